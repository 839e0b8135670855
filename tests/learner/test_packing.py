import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiny import reads, sample

from learner.packing import num_distinct_tokens, pack, split_microbatches


def test_siblings_share_their_common_prefix_once():
    row = pack([sample([1, 2, 3, 4], [3]), sample([1, 2, 5], [2])])
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert row.positions.tolist() == [0, 1, 2, 3, 2]
    assert row.parents.tolist() == [-1, 0, 1, 2, 1]


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), min_size=1, max_size=6))
def test_every_token_sees_exactly_the_tokens_before_it_in_its_own_sequence(sequences):
    row = pack([sample(ids, []) for ids in sequences])
    mask = reads(row.ends())
    for ids, nodes in zip(sequences, row.node_of, strict=True):
        assert row.token_ids[nodes].tolist() == ids
        for position, node in enumerate(nodes):
            assert sorted(np.nonzero(mask[node])[0]) == sorted(nodes[: position + 1])
            assert row.positions[node] == position


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=8), min_size=1, max_size=10), st.integers(8, 30))
def test_microbatches_hold_every_sample_once_and_keep_to_their_size(sequences, max_tokens):
    samples = [sample(ids, [], name=str(index)) for index, ids in enumerate(sequences)]
    batches = split_microbatches(samples, max_tokens)
    assert sorted(one.trajectory_id for batch in batches for one in batch) == sorted(map(str, range(len(samples))))
    assert all(num_distinct_tokens(batch) == len(pack(batch).token_ids) <= max_tokens for batch in batches)
