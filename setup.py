"""Packages of the wheel: passes/ and cost_model/ at the root are parts of autopar.

In a clone links in autopar/ lead there. Archives of the sources may hold text in their place.
"""

from setuptools import find_packages, setup

FOLDERS = {"autopar": "autopar", "autopar.passes": "passes", "autopar.cost_model": "cost_model"}


def packages() -> list[str]:
    """Names of all packages, sorted."""
    inner = {f"{name}.{each}" for name, folder in FOLDERS.items() for each in find_packages(folder)}
    return sorted(inner | FOLDERS.keys())


setup(
    packages=packages(),
    package_dir=FOLDERS,
    # The folder above a clone holds a folder autopar too. Python takes that for a namespace, unless
    # the clone itself is on its path.
    options={"editable_wheel": {"mode": "compat"}},
)
