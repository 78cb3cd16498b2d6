"use strict";
document.documentElement.classList.add("live");

const WIDTH = 1e6;
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const plus = (count, unit) => `${Number(count.toPrecision(3))} ${unit}`;
const time = (s) => s >= 1 ? plus(s, "s") : s >= 1e-3 ? plus(s * 1e3, "ms") : plus(s * 1e6, "µs");
function bytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024) return `${unit === "B" ? count : count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} TiB`;
}

/** The last of ascending numbers that is not above a value; -1 if there is none. */
function lastBelow(numbers, value) {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

/** An action of a pipeline: "2B4" is the backward of micro-batch 4 on stage 2. */
const ACTION = /^(\d+)([FBIW])(\d+)$/;

function spelled(name) {
  const action = name.match(ACTION);
  if (!action) return name;
  const kinds = { F: "forward", B: "backward", I: "gradients of inputs", W: "gradients of parameters" };
  return `${kinds[action[2]]} of micro-batch ${action[3]} on stage ${action[1]} (${name})`;
}

const tip = document.querySelector(".tip");
function show(text, x, y) {
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${clamp(x + 14, 4, innerWidth - box.width - 4)}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? y - box.height - 12 : y + 18}px`;
}

class Timeline {
  constructor(root, data) {
    this.root = root;
    this.data = data;
    this.from = 0;
    this.span = WIDTH;
    this.pointers = new Map();
    this.plots = [...root.querySelectorAll(".plot svg")];
    this.ticks = root.querySelector(".ticks");
    this.reading = root.parentElement.querySelector(".reading");
    this.peak = root.querySelector(".marks .peak");
    this.marked = "";
    this.cross = root.appendChild(document.createElement("div"));
    this.cross.className = "cross";
    this.cross.hidden = true;
    for (const lane of data.tracks.flat()) lane.starts = lane.pieces.map((piece) => piece[0]);
    this.listen();
    this.draw();
  }

  listen() {
    const on = (name, act, options) => this.root.addEventListener(name, act, options);
    on("keydown", (event) => this.key(event));
    on("wheel", (event) => this.wheel(event), { passive: false });
    on("pointerdown", (event) => this.press(event));
    on("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel", "pointerleave"]) {
      on(name, (event) => this.release(event));
    }
    on("dblclick", (event) => this.zoom(0.25, this.at(event.clientX)));
    new ResizeObserver(() => this.draw()).observe(this.root);
    for (const button of document.querySelectorAll("[data-key]")) {
      button.onclick = () => this.key({ key: button.dataset.key, preventDefault() {} });
    }
  }

  /** Where on the step a place on the screen is. */
  at(x) {
    const box = this.ticks.getBoundingClientRect();
    return this.from + (x - box.left) / box.width * this.span;
  }

  set(from, span) {
    this.span = clamp(span, WIDTH / 5000, WIDTH);
    this.from = clamp(from, 0, WIDTH - this.span);
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  zoom(factor, centre = this.from + this.span / 2) {
    const span = clamp(this.span * factor, WIDTH / 5000, WIDTH);
    this.set(centre - (centre - this.from) * span / this.span, span);
  }

  key(event) {
    const moves = { ArrowLeft: -0.2, ArrowRight: 0.2 };
    if (event.key in moves) this.set(this.from + moves[event.key] * this.span, this.span);
    else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "0") this.set(0, WIDTH);
    else return;
    event.preventDefault();
    const ends = [this.from, this.from + this.span].map((x) => time(x / WIDTH * this.data.step));
    this.reading.textContent = `Shown: ${ends[0]} to ${ends[1]}`;
  }

  wheel(event) {
    const box = this.ticks.getBoundingClientRect();
    if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(event.deltaY * 0.004), this.at(event.clientX));
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.set(this.from + event.deltaX / box.width * this.span, this.span);
    } else return;
    event.preventDefault();
  }

  press(event) {
    this.pointers.set(event.pointerId, event.clientX);
    this.root.classList.add("moving");
    this.root.setPointerCapture(event.pointerId);
    this.tell(event);
  }

  release(event) {
    this.pointers.delete(event.pointerId);
    if (!this.pointers.size) this.root.classList.remove("moving");
    if (event.type === "pointerleave" || event.pointerType !== "mouse") {
      this.cross.hidden = true;
      this.mark("");
      show("");
    }
  }

  move(event) {
    const before = this.pointers.get(event.pointerId);
    if (before !== undefined) {
      const width = this.ticks.getBoundingClientRect().width;
      const others = [...this.pointers].filter(([id]) => id !== event.pointerId);
      if (others.length) {
        const other = others[0][1], old = Math.abs(before - other), now = Math.abs(event.clientX - other);
        if (old > 8 && now > 8) this.zoom(old / now, this.at((other + event.clientX) / 2));
      } else this.set(this.from - (event.clientX - before) / width * this.span, this.span);
      this.pointers.set(event.pointerId, event.clientX);
    }
    this.tell(event);
  }

  /** Says what is under the pointer. */
  tell(event) {
    const box = this.ticks.getBoundingClientRect(), at = this.at(event.clientX);
    this.cross.hidden = event.clientX < box.left || event.clientX > box.right;
    this.cross.style.left = `${event.clientX - this.root.getBoundingClientRect().left}px`;
    const inside = (plot) => {
      const own = plot.getBoundingClientRect();
      return event.clientY >= own.top && event.clientY <= own.bottom;
    };
    const index = this.plots.findIndex(inside);
    const text = this.cross.hidden || index < 0 ? "" : this.says(index, at, event.clientY);
    this.mark(text.match(/\bmicro-batch (\d+)/)?.[1] ?? "");
    show(text, event.clientX, event.clientY);
    if (text) this.reading.textContent = text.replaceAll("\n", " · ");
  }

  says(index, at, y) {
    if (index >= this.data.tracks.length) return this.memory(at);
    const top = y - this.plots[index].getBoundingClientRect().top;
    const lanes = this.data.tracks[index].filter((lane) => lane.top <= top);
    const lane = lanes[lanes.length - 1], piece = this.piece(lane, at);
    if (!piece) return "";
    const [start, width, name, look] = piece, unit = this.data.step / WIDTH;
    const block = this.block(lane, at), kind = lane.looks[look].replace(/^[FBIW] s\d+$/, lane.top ? "sent" : "compute").replaceAll("_", "-");
    const parts = [spelled(name), `${lane.name}: ${kind}`, `${time(width * unit)} from ${time(start * unit)}`];
    return [...parts, ...block].join("\n");
  }

  /** Marks the boxes of a micro-batch on all ranks. */
  mark(micro) {
    if (micro === this.marked) return;
    this.marked = micro;
    this.data.tracks.forEach(([lane], index) => {
      this.plots[index].querySelector(".marked")?.remove();
      this.drawNames(lane, this.plots[index]);
      const boxes = micro ? lane.pieces.filter((piece) => piece[2].match(ACTION)?.[3] === micro) : [];
      if (!boxes.length) return;
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("class", "marked");
      path.setAttribute("d", boxes.map(([start, width]) => `M${start} 1h${width}v24h-${width}z`).join(""));
      this.plots[index].append(path);
    });
  }

  /** Shows an interval with some space around it. */
  reveal(from, to) {
    const room = Math.max(0.5 * (to - from), WIDTH / 500);
    this.set(from - room, to - from + 2 * room);
    this.root.focus({ preventScroll: true });
  }

  piece(lane, at) {
    const near = 3 * this.span / this.ticks.clientWidth, index = lastBelow(lane.starts, at + near);
    for (const own of [index, index - 1]) {
      const piece = lane.pieces[own];
      if (piece && piece[0] <= at && piece[0] + piece[1] >= at) return piece;
    }
    const piece = lane.pieces[index];
    return piece && Math.abs(piece[0] + piece[1] / 2 - at) < piece[1] / 2 + near ? piece : null;
  }

  block(lane, at) {
    const first = this.data.tracks[0][0];
    if (first.name !== "blocks" || lane === first || lane.name !== "compute") return [];
    const piece = this.piece(first, at);
    return piece ? [`in ${piece[2]}`] : [];
  }

  memory(at) {
    const { at: times, rows } = this.data.memory, index = Math.max(0, lastBelow(times, at));
    const held = rows.map(([name, row]) => [row[index], name]).filter(([count]) => count);
    const total = held.reduce((sum, [count]) => sum + count, 0);
    const lines = held.sort(([a], [b]) => b - a).map(([count, name]) => `${name} ${bytes(count)}`);
    return [`${bytes(total)} at ${time(times[index] / WIDTH * this.data.step)}`, ...lines].join("\n");
  }

  draw() {
    for (const plot of this.plots) {
      const height = plot.viewBox.baseVal.height;
      plot.setAttribute("viewBox", `${this.from} 0 ${this.span} ${height}`);
    }
    this.drawTicks();
    if (this.peak) {
      const at = (this.peak.dataset.at - this.from) / this.span;
      this.peak.style.left = `${at * 100}%`;
      this.peak.hidden = at < 0 || at > 1;
      this.peak.classList.toggle("before", at > 0.5);
    }
    this.data.tracks.forEach((lanes, index) => this.drawNames(lanes[0], this.plots[index]));
  }

  drawTicks() {
    const seconds = this.span / WIDTH * this.data.step, rough = seconds / Math.max(3, this.ticks.clientWidth / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
    const first = this.from / WIDTH * this.data.step, found = [];
    const last = first + seconds * (1 - 45 / Math.max(90, this.ticks.clientWidth)); // whole names
    for (let n = Math.ceil(first / step); n * step < last; n += 1) {
      const mark = document.createElement("span");
      mark.textContent = n ? time(n * step) : "0 s";
      mark.style.left = `${(n * step - first) / seconds * 100}%`;
      found.push(mark);
    }
    this.ticks.replaceChildren(...found);
  }

  /** Writes names where there is room for them. */
  drawNames(lane, plot) {
    const scale = plot.clientWidth / this.span, found = [];
    for (const [start, width, name, look] of lane.pieces) {
      const left = clamp((start - this.from) * scale, 0, plot.clientWidth);
      const right = clamp((start + width - this.from) * scale, 0, plot.clientWidth);
      const room = (right - left - 5) / 7.5, short = name.slice(name.lastIndexOf(".") + 1).replace(/^\d+(?=[A-Z])/, "").split(" ")[0];
      if (room < Math.min(4, short.length)) continue;
      const text = document.createElement("span");
      text.className = lane.looks[look];
      text.classList.toggle("own", !!this.marked && name.match(ACTION)?.[3] === this.marked);
      text.textContent = room < name.length || ACTION.test(name) ? short : name;
      text.style.left = `${left}px`;
      text.style.width = `${right - left}px`;
      found.push(text);
    }
    plot.nextElementSibling.replaceChildren(...found);
  }
}

/** Says which rank is under the pointer. */
function tellRanks(picture, { columns, node, cell: [size, gap, apart], ranks, mesh, held }) {
  const rankAt = (event) => {
    const box = picture.getBoundingClientRect(), scale = picture.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const left = (column) => column * (size + gap) + Math.floor(column / node) * apart;
    const starts = Array.from({ length: columns }, (_, column) => left(column));
    const at = Math.floor(y / (size + gap)) * columns + Math.max(0, lastBelow(starts, x));
    return at >= 0 && at < ranks.length ? at : -1;
  };
  const tell = (event) => {
    const at = rankAt(event);
    if (at < 0) return show("");
    let rest = ranks[at];
    const place = [...mesh].reverse().map(([axis, count]) => {
      const own = rest % count;
      rest = Math.floor(rest / count);
      return `${axis} ${own}`;
    });
    const lines = [`rank ${ranks[at]}, node ${Math.floor(ranks[at] / node)}`, place.reverse().join(" × ")];
    show([...lines, `stores ${bytes(held[at])} of parameters`].join("\n"), event.clientX, event.clientY);
  };
  picture.addEventListener("pointermove", tell);
  picture.addEventListener("pointerdown", tell);
  picture.addEventListener("pointerleave", () => show(""));
}

const own = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");
const step = own("timeline"), ranks = own("ranks");
if (ranks) tellRanks(document.querySelector(".grid-of-ranks"), ranks);
if (step) {
  const timeline = new Timeline(document.querySelector(".zoom"), step);
  for (const link of document.querySelectorAll(".when")) {
    link.addEventListener("click", () => timeline.reveal(+link.dataset.from, +link.dataset.to));
  }
}

for (const button of document.querySelectorAll(".copy")) {
  button.onclick = async () => {
    const text = button.nextElementSibling;
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(text);
      button.textContent = "Selected: press Ctrl + C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2500);
  };
}
