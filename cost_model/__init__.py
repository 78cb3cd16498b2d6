"""Costs of a plan: times of collectives and operators, memory, and the simulated step.

| folder | |
|---|---|
| `cluster`, `curves`, `algorithms`, `nccl`, `topology` | times of collectives |
| `kernels` | times of operators by model, memory traffic and aliasing |
| `measurement` | times of collectives, operators and optimizers on this machine |
| `memory` | peak memory of a lowered graph and of the optimizer |
| `simulator` | step time, exposed communication and timeline of a graph or pipeline |

Every time is a `cost.Cost` with its origin: measured, imported or modelled.
"""
