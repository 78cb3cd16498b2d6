"""What a plan costs: measured clusters and operators, and the simulated step.

| module | |
|---|---|
| `measure` | times of collectives on the live process group, as a `Cluster` |
| `cluster`, `curves`, `collectives` | the times of collectives, kept, interpolated, defined |
| `operators` | times of operators on this device, or of a roofline |
| `memory`, `aliases` | peak tensor bytes of a lowered graph, by liveness of storages |
| `simulate` | step time, exposed communication, memory and timeline of a lowered graph |
| `optimizer` | bytes of state that an optimizer keeps |

Every time is a `cost.Cost`, which says whether it was measured, imported or modelled.
"""
