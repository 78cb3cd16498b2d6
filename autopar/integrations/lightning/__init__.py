"""`AutoparStrategy` for Lightning's Trainer, and `AutoparFabricStrategy` for its Fabric."""

from autopar.integrations.lightning.fabric import AutoparFabricStrategy
from autopar.integrations.lightning.trainer import AutoparStrategy

__all__ = ["AutoparFabricStrategy", "AutoparStrategy"]
