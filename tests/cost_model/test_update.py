import torch

from autopar.cost_model.update import UpdateCost, measure_update


def test_linear_in_bytes_and_parameters() -> None:
    cost = UpdateCost(1e-9, 1e-5, 1e-4, "measured today")
    plain = cost.seconds(1000, 2, dtensors=False)
    assert abs(plain.seconds - (1e-6 + 2e-5)) < 1e-12
    assert cost.seconds(1000, 2, dtensors=True).seconds > plain.seconds
    assert plain.kind == "measured"


def test_measures_any_optimizer() -> None:
    for optimizer in (torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1)):
        cost = measure_update(optimizer, torch.device("cpu"), None)
        assert cost.per_parameter > 0
        assert cost.seconds(2**24, 1, dtensors=False).seconds > cost.per_parameter
