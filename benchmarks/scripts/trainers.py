"""Scripts of transformers' Trainer, trl and sentence-transformers, after their documentation."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import distributed as dist
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    DistilBertConfig,
    DistilBertForTokenClassification,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

from benchmarks.scripts.run import Run, pictures, sentences, tokenizer

VOCABULARY = 47
BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 5,
    "eos_token_id": 6,
}


def tokenized(count: int, seed: int = 0) -> Dataset:
    words = tokenizer()
    data = sentences(count, seed)
    return data.map(lambda rows: words(rows["text"], truncation=True), batched=True)


def text_classification(run: Run) -> nn.Module:
    """Trainer: BERT, metrics, evaluation and the best checkpoint at the end."""

    def compute_metrics(prediction: Any) -> dict[str, float]:
        logits, labels = prediction
        return {"accuracy": float((np.argmax(logits, -1) == labels).mean())}

    words = tokenizer()
    saves = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    trainer = run.trainer(Trainer)(
        model=BertForSequenceClassification(BertConfig(**BERT, num_labels=3)),
        args=TrainingArguments(**run.arguments(weight_decay=0.01) | saves),
        train_dataset=tokenized(36),
        eval_dataset=tokenized(11, 1),
        processing_class=words,
        data_collator=DataCollatorWithPadding(words),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.evaluate()
    return trainer.model


def language_modeling(run: Run) -> nn.Module:
    """Trainer: GPT-2, accumulation, warm-up, cosine, clipping, logs at each step."""
    words = tokenizer()
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    settings = {
        "gradient_accumulation_steps": 2,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    trainer = run.trainer(Trainer)(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(**run.arguments(**settings)),
        train_dataset=tokenized(45).remove_columns(["text", "label"]),
        eval_dataset=tokenized(10, 1).remove_columns(["text", "label"]),
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
    )
    trainer.train()
    return trainer.model


def masked_modeling(run: Run) -> nn.Module:
    """Trainer: BERT for masked words, which the collator draws; evaluation first."""
    words = tokenizer()
    trainer = run.trainer(Trainer)(
        model=BertForMaskedLM(BertConfig(**BERT)),
        args=TrainingArguments(**run.arguments(eval_on_start=True, eval_strategy="epoch")),
        train_dataset=tokenized(32).remove_columns(["text", "label"]),
        eval_dataset=tokenized(8, 1).remove_columns(["text", "label"]),
        data_collator=DataCollatorForLanguageModeling(words, mlm_probability=0.3, seed=5),
    )
    trainer.train()
    return trainer.model


def translation(run: Run) -> nn.Module:
    """Seq2SeqTrainer: T5, label smoothing, generation in evaluation."""
    words = tokenizer()
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    data = tokenized(24).map(lambda row: {"labels": row["input_ids"][::-1]})
    settings = {
        "predict_with_generate": True,
        "generation_max_length": 6,
        "label_smoothing_factor": 0.1,
        "eval_strategy": "epoch",
    }
    trainer = run.trainer(Seq2SeqTrainer)(
        model=model,
        args=Seq2SeqTrainingArguments(**run.arguments(**settings)),
        train_dataset=data.remove_columns(["text", "label"]),
        eval_dataset=data.select(range(8)).remove_columns(["text", "label"]),
        processing_class=words,
        data_collator=DataCollatorForSeq2Seq(words, model=model),
    )
    trainer.train()
    return trainer.model


def token_classification(run: Run) -> nn.Module:
    """Trainer: DistilBERT, a loss of its own with weights of classes, early stopping."""

    class WeightedTrainer(Trainer):
        def compute_loss(
            self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weight = torch.tensor([1.0, 2.0, 0.5], dtype=outputs.logits.dtype)
            loss = nn.functional.cross_entropy(
                outputs.logits.flatten(0, 1), labels.flatten(), weight=weight, ignore_index=-100
            )
            return (loss, outputs) if return_outputs else loss

    words = tokenizer()
    config = DistilBertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        n_layers=2,
        n_heads=2,
        dim=16,
        hidden_dim=32,
        dropout=0.0,
        attention_dropout=0.0,
        num_labels=3,
    )
    data = tokenized(32).map(lambda row: {"labels": [i % 3 for i in row["input_ids"]]})
    data = data.remove_columns(["text", "label"])
    settings = {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "num_train_epochs": 4,
    }
    trainer = run.trainer(WeightedTrainer)(
        model=DistilBertForTokenClassification(config),
        args=TrainingArguments(**run.arguments(**settings)),
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        data_collator=DataCollatorForTokenClassification(words),
        callbacks=[EarlyStoppingCallback(1)],
    )
    trainer.train()
    return trainer.model


def image_classification(run: Run) -> nn.Module:
    """Trainer: ViT, a collate function of its own, a dataset of pictures."""

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        values = torch.stack([picture for picture, _ in rows])
        return {"pixel_values": values, "labels": torch.tensor([label for _, label in rows])}

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    trainer = run.trainer(Trainer)(
        model=ViTForImageClassification(config),
        args=TrainingArguments(**run.arguments(remove_unused_columns=False, eval_strategy="epoch")),
        train_dataset=pictures(30),
        eval_dataset=pictures(9, seed=1),
        data_collator=collate,
    )
    trainer.train()
    return trainer.model


def adapters(run: Run) -> nn.Module:
    """Trainer: LoRA of peft on Llama, activation checkpointing."""
    words = tokenizer()
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    settings = {"gradient_checkpointing": True}
    trainer = run.trainer(Trainer)(
        model=get_peft_model(model, lora),
        args=TrainingArguments(**run.arguments(**settings)),
        train_dataset=tokenized(24).remove_columns(["text", "label"]),
        data_collator=DataCollatorForLanguageModeling(words, mlm=False),
    )
    trainer.train()
    return trainer.model


def fine_tuning(run: Run) -> nn.Module:
    """trl.SFTTrainer: texts, a default Llama."""
    trainer = run.trainer(trl.SFTTrainer)(
        model=LlamaForCausalLM(LlamaConfig(**LLAMA)),
        args=trl.SFTConfig(
            max_length=32, gradient_checkpointing=False, bf16=False, **run.arguments()
        ),
        train_dataset=sentences(24).remove_columns("label"),
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer.model


def preferences(run: Run) -> nn.Module:
    """trl.DPOTrainer: prompts, chosen and rejected answers, a reference model."""
    texts = sentences(48)["text"]
    data = Dataset.from_dict({"prompt": texts[::3], "chosen": texts[1::3], "rejected": texts[2::3]})
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    trainer = run.trainer(trl.DPOTrainer)(
        model=model,
        ref_model=copy.deepcopy(model),
        args=trl.DPOConfig(
            max_length=32, gradient_checkpointing=False, bf16=False, **run.arguments()
        ),
        train_dataset=data,
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer.model


def rewards(run: Run) -> nn.Module:
    """trl.RewardTrainer: a reward model from pairs of answers."""
    texts = sentences(48)["text"]
    data = Dataset.from_dict({"chosen": texts[::2], "rejected": texts[1::2]})
    trainer = run.trainer(trl.RewardTrainer)(
        model=LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=1)),
        args=trl.RewardConfig(
            max_length=32, gradient_checkpointing=False, bf16=False, **run.arguments()
        ),
        train_dataset=data,
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer.model


def _sentence_encoder(folder: str) -> Any:
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertModel

    BertModel(BertConfig(**BERT)).save_pretrained(f"{folder}-bert")  # on rank 0 alone
    tokenizer().save_pretrained(f"{folder}-bert")
    if dist.is_initialized():
        dist.barrier()
    words = models.Transformer(f"{folder}-bert", max_seq_length=32)
    return SentenceTransformer(modules=[words, models.Pooling(16)], device="cpu")


def sentence_pairs(run: Run) -> nn.Module:
    """SentenceTransformerTrainer: pairs of texts, negatives within the batch."""
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    texts = sentences(48)["text"]
    model = _sentence_encoder(run.folder)
    trainer = run.trainer(SentenceTransformerTrainer)(
        model=model,
        args=SentenceTransformerTrainingArguments(**run.arguments(**run.split_batches)),
        train_dataset=Dataset.from_dict({"anchor": texts[::2], "positive": texts[1::2]}),
        loss=losses.MultipleNegativesRankingLoss(model),
    )
    trainer.train()
    return trainer.model


def sentence_scores(run: Run) -> nn.Module:
    """SentenceTransformerTrainer: pairs of texts with a score, evaluation at each epoch."""
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    texts = sentences(48)["text"]  # sentence-transformers drops an uneven last batch on ranks
    scores = [index % 5 / 4 for index in range(24)]
    data = {"sentence1": texts[::2], "sentence2": texts[1::2], "score": scores}
    model = _sentence_encoder(run.folder)
    trainer = run.trainer(SentenceTransformerTrainer)(
        model=model,
        args=SentenceTransformerTrainingArguments(
            **run.arguments(eval_strategy="epoch", **run.split_batches)
        ),
        train_dataset=Dataset.from_dict(data),
        eval_dataset=Dataset.from_dict(data),
        loss=losses.CosineSimilarityLoss(model),
    )
    trainer.train()
    return trainer.model
