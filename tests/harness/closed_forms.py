"""Closed forms of the named schedules' bubbles and memory, for equal stages and transfers that take no time.

F, I and W are seconds of one stage, B = I + W, and memory is in micro-batches of one stage; a rank of an interleaved
or V-shaped schedule has v stages, so that both are v times the papers' figures, which count all of a rank's layers.

| schedule | bubble | memory of the fullest rank | source | the bubble holds for |
|---|---|---|---|---|
| gpipe | (P − 1)(F + B) | M | 1811.06965, section 2.3 | all |
| 1f1b | (P − 1)(F + B) | P | 2104.04473, section 2.2.1 | all |
| 1f1b-split | (P − 1)(F + I) | P | the same with B in halves | all |
| interleaved-1f1b | (P − 1)(F + B) | (v + 1) P − 1 | 2104.04473, section 2.2.2 | all; memory: M > P |
| zb-h1 | (P − 1)(F + I − W) | P | 2401.10241, table 1 | W ≤ F, W ≤ I |
| zb-h2 | (P − 1)(F + I − 2 W) | 2 P − 1 | 2401.10241, table 1 | W ≤ F, W ≤ I |
| zb-v | 0 | 2 P | 2401.10241, section 6 | F = I = W |
| v-half | about 3 P F, here ⌊(7 P − 8) / 2⌋ F | 2 ⌊(P + 2) / 2⌋ | 2405.15362, table 2 | F = I = W, M ≥ 2 P |
| v-min | about 4 P F, here (4 P − 5) F, 2 F more where 3 divides P | 2 ⌊(P + 4) / 3⌋ | the same | the same |
| dualpipev | (P − 1)(F&B + B − 3 W) | 2 P + 1 | 2412.19437, table 2, PP = 2 P | F ≤ I, W ≤ I |

The bubble of zb-h2 and zb-v is that of the longest span of one rank (`longest_span`): their ranks start and
end one after another, and the papers let the next step begin without a barrier. With a barrier after the step, ranks
wait another (P − 1) F to fill. That of dualpipev is of pairs that run as one overlapped task of F&B seconds; run one
after the other (F&B = F + B), with the activation sent in between, less remains: (P − 1)(F + I − W) for W ≤ I ≤ F.
"""

from __future__ import annotations

from hyper_parallel.schedule import ScheduleName, Timing

SPAN_BUBBLE = frozenset({ScheduleName.ZB_H2, ScheduleName.ZB_V})
"""Schedules whose published bubble is that of a rank's span and not of the makespan."""


def closed_form_bubble(
    name: ScheduleName,
    ranks: int,
    forward: float,
    input: float,
    weight: float,
    pair: float | None = None,
) -> float:
    """Seconds of the bubble; arguments are seconds of one stage. `pair`: F&B of dualpipev, F + B when left out.

    Of v-half and v-min it is that of this project's own building blocks, which the papers give asymptotically only.
    """
    backward = input + weight
    match name:
        case ScheduleName.GPIPE | ScheduleName.ONE_F_ONE_B | ScheduleName.INTERLEAVED:
            return (ranks - 1) * (forward + backward)
        case ScheduleName.ONE_F_ONE_B_SPLIT:
            return (ranks - 1) * (forward + input)
        case ScheduleName.ZB_H1:
            return (ranks - 1) * (forward + input - weight)
        case ScheduleName.ZB_H2:
            return (ranks - 1) * (forward + input - 2 * weight)
        case ScheduleName.ZB_V:
            return 0.0
        case ScheduleName.V_HALF:
            return (7 * ranks - 8) // 2 * forward
        case ScheduleName.V_MIN:
            return (4 * ranks - 5 + 2 * (ranks % 3 == 0)) * forward
        case ScheduleName.DUAL_PIPE_V:
            together = forward + backward if pair is None else pair
            return (ranks - 1) * (together + backward - 3 * weight)


def closed_form_peak(name: ScheduleName, ranks: int, micro_batches: int, stages_per_rank: int = 2) -> int:
    """Micro-batches of one stage that the fullest rank holds. `stages_per_rank`: of interleaved-1f1b."""
    match name:
        case ScheduleName.GPIPE:
            return micro_batches
        case ScheduleName.ONE_F_ONE_B | ScheduleName.ONE_F_ONE_B_SPLIT | ScheduleName.ZB_H1:
            return min(ranks, micro_batches)
        case ScheduleName.INTERLEAVED:
            return min((stages_per_rank + 1) * ranks - 1, stages_per_rank * micro_batches)
        case ScheduleName.ZB_H2:
            return 2 * ranks - 1
        case ScheduleName.ZB_V:
            return 2 * ranks
        case ScheduleName.V_HALF:
            return 2 * ((ranks + 2) // 2)
        case ScheduleName.V_MIN:
            return 2 * ((ranks + 4) // 3)
        case ScheduleName.DUAL_PIPE_V:
            return 2 * ranks + 1


def longest_span(timing: Timing) -> float:
    """The longest time from a rank's own first start to its last end: a step's time where steps follow one another
    without a barrier, which is what the zero-bubble papers count."""
    return max(e[-1] - s[0] for s, e in zip(timing.starts, timing.ends, strict=True) if s)
