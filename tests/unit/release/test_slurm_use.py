"""What SLURM is asked, and in which order. A script plays SLURM."""

from collections.abc import Sequence

from flexfloor.membership.events import Leave
from flexfloor.release.slurm import GivenBack, SlurmUse

NODES = {0: "n1", 1: "n1", 2: "n2", 3: "n2", 4: "n3", 5: "n3"}
DEADLINE_S = 20.0


class Slurm:
    """A job of three nodes whose steps end after some looks."""

    def __init__(self, looks: dict[str, int]) -> None:
        self.nodes = ["n1", "n2", "n3"]
        self.looks = looks
        """Node -> looks at which a step of the job still runs there."""
        self.updates: list[str] = []

    def run(self, argv: Sequence[str]) -> str:
        match list(argv):
            case ["squeue", "--noheader", "--steps", node, "--format=%i"]:
                name = node.removeprefix("--nodelist=")
                self.looks[name] = self.looks.get(name, 0) - 1
                return "8.0\n7.extern\n" + ("7.1\n" if self.looks[name] >= 0 else "")
            case ["squeue", "--noheader", "--jobs=7", "--format=%N"]:
                return f"{','.join(self.nodes)}\n"
            case ["scontrol", "show", "hostnames", listed]:
                return listed.replace(",", "\n") + "\n"
            case ["scontrol", "update", "JobId=7", change]:
                self.updates.append(change)
                self.nodes = change.removeprefix("NodeList=").split(",")
                return ""
        raise AssertionError(argv)


def use_of(slurm: Slurm, **changes: float) -> SlurmUse:
    use = SlurmUse("7", slurm.run, clock=lambda: 5.0, **changes)
    use.begin(NODES)
    return use


def test_only_ranks_of_other_nodes_exit() -> None:
    use = use_of(Slurm({}))
    assert [use.leave_of(rank) for rank in NODES] == [Leave.park] * 2 + [Leave.exit] * 4


def test_a_node_leaves_the_job_once_its_last_rank_and_its_step_are_gone() -> None:
    slurm = Slurm({"n3": 1})
    use = use_of(slurm)
    use.left((2, 4))
    assert use.wait(DEADLINE_S)
    assert slurm.updates == []
    use.left((5, 1))
    assert use.wait(DEADLINE_S)
    assert slurm.updates == ["NodeList=n1,n2"]
    use.left((3, 0))
    assert use.wait(DEADLINE_S)
    assert slurm.updates == ["NodeList=n1,n2", "NodeList=n1"]
    assert use.given_back == [GivenBack(node="n3", at_s=5.0), GivenBack(node="n2", at_s=5.0)]


def test_a_node_with_a_step_that_goes_on_is_kept_and_the_reason_said() -> None:
    slurm = Slurm({"n2": 1000})
    use = use_of(slurm, steps_end_timeout_s=0.0)
    use.left((2, 3))
    assert use.wait(DEADLINE_S)
    assert slurm.updates == []
    assert use.given_back[0].refusal == "job steps 7.1 still run on it 0 s after its ranks have exited"


def test_what_slurm_refuses_is_kept_with_its_words() -> None:
    def fail(argv: Sequence[str]) -> str:
        raise ValueError("squeue failed with 1: Unable to contact slurm controller")

    use = SlurmUse("7", fail)
    use.begin(NODES)
    use.left((4, 5))
    assert use.wait(DEADLINE_S)
    assert "Unable to contact slurm controller" in use.given_back[0].refusal
