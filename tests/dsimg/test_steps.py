"""dsimg.steps: a permutation by seed and epoch, and steps that are means over their samples."""

import numpy as np
import pytest

from dsimg.steps import StepPlan, epoch_order


def test_epoch_order_is_a_permutation_by_seed_and_epoch() -> None:
    order = epoch_order(10, seed=1, epoch=0)
    assert order.tolist() == [7, 9, 0, 3, 5, 8, 1, 6, 2, 4]
    assert sorted(order.tolist()) == list(range(10))
    assert epoch_order(10, seed=1, epoch=1).tolist() != order.tolist()
    assert epoch_order(10, seed=2, epoch=0).tolist() != order.tolist()


def test_full_steps_are_contiguous_blocks() -> None:
    plan = StepPlan(samples=48, micro=4, accumulation=2, world=3)
    assert (plan.batch_size, plan.steps) == (24, 2)
    blocks = list(plan.blocks(1))
    assert [block.positions.tolist() for block in blocks] == [
        [4, 5, 6, 7],
        [16, 17, 18, 19],
        [28, 29, 30, 31],
        [40, 41, 42, 43],
    ]
    assert [block.boundary for block in blocks] == [False, True, False, True]
    assert all(block.weights.tolist() == [0.25] * 4 for block in blocks)
    assert all(block.partner.tolist() == [1, 0, 3, 2] for block in blocks)
    assert [block.positions.tolist() for block in plan.blocks(1, start_step=1)] == [[28, 29, 30, 31], [40, 41, 42, 43]]


@pytest.mark.parametrize("micro", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_step_is_the_mean_over_its_samples(micro: int, accumulation: int, world: int) -> None:
    for samples in (1, 2, 3, 7, 31, 48, 50, 97):
        plan = StepPlan(samples=samples, micro=micro, accumulation=accumulation, world=world)
        ranks = [list(plan.blocks(rank)) for rank in range(world)]
        assert len({len(blocks) for blocks in ranks}) == 1
        gradient = np.zeros((plan.steps, samples))
        for blocks in ranks:
            assert sum(block.boundary for block in blocks) == plan.steps
            assert blocks[-1].boundary
            step = 0
            for block in blocks:
                assert min(2, micro) <= len(block.positions) <= max(micro, min(2, micro))
                np.add.at(gradient[step], block.positions, block.weights / world / accumulation)
                mixed = block.partner != np.arange(len(block.partner))
                assert np.all(block.positions[mixed] // 2 == block.positions[block.partner[mixed]] // 2)
                assert np.all(block.weights[mixed] > 0)
                step += block.boundary
        for step in range(plan.steps):
            low, high = step * plan.batch_size, min((step + 1) * plan.batch_size, samples)
            expected = np.zeros(samples)
            expected[low:high] = 1 / (high - low)
            np.testing.assert_allclose(gradient[step], expected, rtol=1e-6)


def test_the_tail_is_dealt_out_evenly() -> None:
    plan = StepPlan(samples=16 + 13, micro=4, accumulation=2, world=2)
    tails = [list(plan.blocks(rank, start_step=1)) for rank in range(2)]
    assert [[len(block.positions) for block in blocks] for blocks in tails] == [[2, 4], [4, 3]]
    first, second = tails
    assert [block.positions.tolist() for block in (first[0], second[0], first[1], second[1])] == [
        [16, 17],
        [18, 19, 20, 21],
        [22, 23, 24, 25],
        [26, 27, 28],
    ]
    short = StepPlan(samples=8 + 1, micro=4, accumulation=1, world=2)
    last = [list(short.blocks(rank))[-1] for rank in range(2)]
    assert [block.positions.tolist() for block in last] == [[0, 1], [8, 0]]
    assert [block.weights.tolist() for block in last] == [[0, 0], [2, 0]]
    assert [block.partner.tolist() for block in last] == [[0, 1], [0, 1]]
