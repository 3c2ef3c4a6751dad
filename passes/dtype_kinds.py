"""How much precision a float value needs.

* `WEIGHT`: a parameter, or an expression of parameters alone. Has no dtype of its own; it is cast
  where it is used.
* `INPUT`: a float input of the user, cast where it is used.
* `STREAM`: takes the compute dtype.
* `RAISED`: a stream value that the source raised to fp32. Because an fp32 capture's cast is a
  no-op, torch.export may show *later* uses of the value through the cast as well (T5's residual
  add reads it): so each user decides which one it reads.
* `PRECISE`: stays in fp32: statistics of norms, totals and lengths (they outgrow fp16), what
  follows from a raised value up to where the source casts back.
* `EXACT`: stays in fp32: computed from integers and buffers alone (positions, rotary angles,
  masks). No cast of the source lowers it; the stream op that reads it gets it cast.
* `ISLAND`: EXACT, and ends in integers or booleans only (T5's position buckets): no target dtype
  may touch it.
"""

from enum import Enum, auto


class Class(Enum):
    """How much precision a float value needs; see the module's text."""

    WEIGHT = auto()
    INPUT = auto()
    STREAM = auto()
    RAISED = auto()
    PRECISE = auto()
    EXACT = auto()
    ISLAND = auto()


KEPT_HIGH = frozenset({Class.PRECISE, Class.EXACT, Class.ISLAND})
