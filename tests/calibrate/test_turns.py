"""Operands that take turns: the first stays where it is, the others move through more memory than caches hold."""

from itertools import islice

import torch

from hyper_parallel.calibrate.timing import KEPT, in_turns, tensors_of


def test_the_first_operand_stays_and_the_others_take_turns_with_equal_values_and_layouts() -> None:
    first, second = torch.randn(4, 2**18), torch.randn(2**18, 4).t()
    turns = in_turns((first, [second], 3))
    count = KEPT // second.nbytes
    rounds = list(islice(turns, 2 * count))
    assert all(one[0] is first and one[2] == 3 for one in rounds)
    assert len({one[1][0].data_ptr() for one in rounds}) == count
    assert rounds[0][1][0].data_ptr() == rounds[count][1][0].data_ptr()
    assert all(torch.equal(one[1][0], second) and one[1][0].stride() == second.stride() for one in rounds)


def test_one_operand_alone_is_always_the_same() -> None:
    x = torch.randn(8)
    assert {id(one[0]) for one in islice(in_turns((x,)), 5)} == {id(x)}
    assert tensors_of(((x, [x]), 1)) == [x, x]
