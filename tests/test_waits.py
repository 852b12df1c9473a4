"""Who waits for whom: hand-made journals of the cases that matter, then random programs that are played until they are stuck."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.launching import waits
from helpers.measuring.records import Collective

ALL = (0, 1, 2)
ENDED, OPEN = 1.0, None


def made(rank, sequence, op="all_reduce", group=ALL, size=4, end=ENDED, peer=None, waited_from=None, dtype="float32", start=None):
    when = float(sequence) if start is None else start
    return Collective(rank, sequence, op, group, dtype, (size // 4,), size, when, end, f"line {sequence}", peer, waited_from)


def test_nobody_waits_when_all_is_done():
    done = [made(rank, 0) for rank in ALL]
    assert waits.in_flight(done) == {}
    assert waits.waited_for(done, {}) == set()
    assert waits.first_difference(done) is None
    assert waits.in_flight([]) == {}
    assert waits.first_difference([]) is None


def test_the_absent_member_is_waited_for():
    recorded = [*(made(rank, 0) for rank in ALL), made(0, 1, end=OPEN), made(2, 1, end=OPEN)]
    assert sorted(waits.in_flight(recorded)) == [0, 2]
    assert waits.waited_for(recorded, waits.in_flight(recorded)) == {1}
    assert waits.first_difference(recorded) == {0: recorded[3], 1: None, 2: recorded[4]}
    assert waits.odd_one_out(waits.first_difference(recorded)) == 1


def test_what_a_rank_is_known_to_block_on_comes_before_what_it_left_open():
    left_open = made(0, 0, op="send", end=OPEN, peer=2)
    blocks = made(0, 1, end=OPEN, waited_from=1.5)
    assert waits.in_flight([left_open, blocks])[0] is blocks


def test_an_end_that_nobody_wrote_down_is_no_wait_once_all_have_come():
    scattered = [made(rank, 0, op="reduce_scatter", end=OPEN) for rank in ALL]
    sent = [made(0, 1, op="send", end=OPEN, peer=1), made(1, 1, op="recv", end=ENDED, peer=0)]
    stuck = [made(0, 2, end=OPEN), made(1, 2, end=OPEN)]
    recorded = [*scattered, *sent, *stuck]
    assert waits.in_flight(recorded) == {0: stuck[0], 1: stuck[1]}
    assert waits.waited_for(recorded, waits.in_flight(recorded)) == {2}


def test_sends_and_receives_are_matched_by_pair_and_direction():
    recorded = [made(0, 0, op="send", peer=1), made(1, 0, op="recv", peer=0), made(0, 1, op="recv", peer=1, end=OPEN)]
    assert waits.waited_for(recorded, waits.in_flight(recorded)) == {1}
    recorded.append(made(1, 1, op="recv", peer=2, end=OPEN))
    assert waits.waited_for(recorded, waits.in_flight(recorded)) == {2}
    recorded.append(made(2, 0, op="recv", peer=1, end=OPEN))
    assert waits.waited_for(recorded, waits.in_flight(recorded)) == set()


def test_a_receive_from_anyone_waits_for_all_others():
    recorded = [made(0, 0, op="recv", end=OPEN), made(1, 0, op="recv", peer=0, end=OPEN)]
    assert waits.waited_for(recorded, waits.in_flight(recorded)) == {2}
    assert "from any rank" in waits.describe(recorded[0])


def test_groups_have_sequences_of_their_own():
    pair = (0, 2)
    recorded = [made(0, 0, group=pair, end=OPEN), made(1, 0, end=OPEN), made(2, 0, end=OPEN)]
    assert waits.in_flight(recorded) == {0: recorded[0], 1: recorded[1], 2: recorded[2]}
    assert waits.waited_for(recorded, waits.in_flight(recorded)) == set()


def test_gathers_scatters_and_uneven_exchanges_do_not_differ_by_size():
    for op in ("gather", "scatter", "all_to_all"):
        assert waits.first_difference([made(0, 0, op=op, size=12), made(1, 0, op=op), made(2, 0, op=op)]) is None
    assert waits.first_difference([made(0, 0, size=12), made(1, 0), made(2, 0)]) is not None
    assert waits.first_difference([made(0, 0, dtype="int32"), made(1, 0), made(2, 0)]) is not None


def test_the_earliest_difference_of_all_groups_is_the_first():
    late = [made(0, 3, group=(0, 1), start=3.0), made(1, 3, op="broadcast", group=(0, 1), start=3.5)]
    early = [made(0, 4, group=(0, 2), start=1.0), made(2, 4, op="broadcast", group=(0, 2), start=2.0)]
    assert waits.first_difference(late + early) == {0: early[0], 2: early[1]}


@pytest.mark.parametrize(
    ("row", "odd"),
    [
        ({0: "a", 1: "b"}, None),
        ({0: "a", 1: "a", 2: "b"}, 2),
        ({0: "a", 1: "b", 2: "c"}, None),
        ({0: "a", 1: "a", 2: "b", 3: "b"}, None),
        ({0: "a", 1: "a", 2: "a", 3: None}, 3),
        ({0: "a", 1: "a", 2: "a"}, None),
    ],
)
def test_one_rank_is_singled_out_only_where_the_others_agree(row, odd):
    assert waits.odd_one_out({rank: op and made(rank, 0, op=op) for rank, op in row.items()}) == odd


def test_descriptions():
    assert waits.describe(made(1, 3, size=4096)) == "all_reduce (float32, 4,096 B) over ranks 0, 1, 2 at line 3"
    assert waits.describe(made(1, 3, op="send", peer=2)) == "send (float32, 4 B) to rank 2 at line 3"
    barrier = Collective(0, 0, "barrier", (0, 1), None, (), 0, 0.0, None, None)
    assert waits.describe(barrier) == "barrier (no payload) over ranks 0, 1"
    row = {0: barrier, 1: None}
    assert (
        waits.describe_difference(row) == "  rank 0 issued barrier (no payload) over ranks 0, 1\n  rank 1 issued nothing any more"
    )


STACK = """Thread 0x00007f0000000700 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/somewhere/pool.py", line 3 in work

Current thread 0x00007f0000000740 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/env/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "<cell 7>", line 4 in inner
  File "<cell 7>", line 9 in job
  File "/package/launching/rank.py", line 65 in main
  File "<string>", line 1 in <module>
"""


def test_a_stack_is_read_from_the_job_to_the_library():
    expected = ["cell 7, line 9", "cell 7, line 4", "torch/distributed/distributed_c10d.py, line 3252 in all_reduce"]
    assert waits.read_stack(STACK, "/package/launching/rank.py") == expected


def test_a_stack_too_deep_to_be_written_whole_is_that_of_the_current_thread():
    cut = STACK.replace(
        '  File "/package/launching/rank.py", line 65 in main\n  File "<string>", line 1 in <module>\n', "  ...\n"
    )
    assert waits.read_stack(cut, "/package/launching/rank.py")[1] == "cell 7, line 4"
    assert waits.read_stack("", "/package/launching/rank.py") == []


def play(programs):
    """Play ranks' programs of blocking operations until nobody can go on; the collectives they would have recorded.

    An operation is (group,) or ("send" | "recv", peer); a send goes on at once, as with small messages.
    """
    recorded, at, waiting = [], [0] * len(programs), [None] * len(programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if waiting[rank] is None and at[rank] < len(program):
                kind, *rest = program[at[rank]]
                if isinstance(kind, tuple):
                    recorded.append(made(rank, at[rank], group=kind, end=OPEN))
                else:
                    recorded.append(made(rank, at[rank], op=kind, end=OPEN, peer=rest[0]))
                waiting[rank], moved = recorded[-1], True
        meetings = waits.Meetings(recorded)
        for rank, operation in enumerate(waiting):
            if operation is not None and (operation.op == "send" or not meetings.missing(operation)):
                if operation.op != "send":  # nobody waits for the end of a send, so nobody writes it down
                    recorded[recorded.index(operation)] = made(
                        rank, operation.sequence, operation.op, operation.group, operation.bytes, ENDED, operation.peer
                    )
                waiting[rank], moved, at[rank] = None, True, at[rank] + 1
    return recorded, waiting


@st.composite
def programs_with_a_culprit(draw):
    """The same correct job on every rank, of which one rank stops part way."""
    ranks = draw(st.integers(2, 4))
    programs = [[] for _ in range(ranks)]
    groups = [g for size in range(2, ranks + 1) for g in itertools.combinations(range(ranks), size)]
    for _ in range(draw(st.integers(1, 12))):
        if draw(st.booleans()):
            group = draw(st.sampled_from(groups))
            for rank in group:
                programs[rank].append((group,))
        else:
            sender, receiver = draw(st.permutations(range(ranks)))[:2]
            programs[sender].append(("send", receiver))
            programs[receiver].append(("recv", sender))
    culprit = draw(st.integers(0, ranks - 1))
    programs[culprit] = programs[culprit][: draw(st.integers(0, len(programs[culprit])))]
    return programs, culprit


@settings(max_examples=200, deadline=None)
@given(programs_with_a_culprit())
def test_in_a_correct_job_of_which_one_rank_stops_only_that_rank_is_waited_for(case):
    programs, culprit = case
    recorded, waiting = play(programs)
    stuck = {rank: operation for rank, operation in enumerate(waiting) if operation is not None}
    found = waits.in_flight(recorded)
    assert {rank: found.get(rank) for rank in stuck} == stuck
    assert waits.waited_for(recorded, stuck) == ({culprit} if stuck else set())
