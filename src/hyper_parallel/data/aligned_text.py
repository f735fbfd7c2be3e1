"""Positions of a text after a processor has written out its placeholders of media.

A processor replaces each placeholder by as many tokens as the media have features, and leaves the text between as it
is. So the texts between are found one after the other, the last at the end.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence


class AlignedText:
    """The parts of a text that a processor has left as they are."""

    def __init__(self, starts: list[int], shifts: list[int], ends: list[int]) -> None:
        self._starts, self._shifts, self._ends = starts, shifts, ends

    @classmethod
    def of(cls, text: str, written: str, placeholders: Sequence[str]) -> AlignedText | None:
        """`written`: what the processor made of `text`. None where that is more than its placeholders written out."""
        pattern = "|".join(re.escape(one) for one in sorted(placeholders, key=len, reverse=True) if one)
        gaps = [found.span() for found in re.finditer(pattern, text)] if pattern else []
        starts, shifts, ends, at = [], [], [], 0
        for number, (gap, stop) in enumerate(
            zip([(0, 0), *gaps], [*(first for first, _ in gaps), len(text)], strict=True)
        ):
            between, first = text[gap[1] : stop], gap[1]
            whole = text[gap[0] : stop]
            # Placeholders side by side are told apart by their number alone.
            if written.startswith(whole, at) and (between or not number or written[at:] == whole):
                between, first, found = whole, gap[0], at  # it was not written out
            elif number == 0:
                return None
            else:
                found = written.find(between, at)
            if number == len(gaps):
                found = len(written) - len(between)
            if found < at or not written.startswith(between, found):
                return None
            starts.append(found)
            shifts.append(found - first)
            at = found + len(between)
            ends.append(at)
        return cls(starts, shifts, ends)

    def in_text(self, first: int, last: int) -> tuple[int, int] | None:
        """Where the written characters [first, last) are in the text; None where media stand."""
        part = bisect_right(self._starts, first) - 1
        while part > 0 and self._ends[part] <= first:  # parts may be empty
            part -= 1
        if part < 0 or first >= self._ends[part]:
            return None
        shift = self._shifts[part]
        return first - shift, min(last, self._ends[part]) - shift
