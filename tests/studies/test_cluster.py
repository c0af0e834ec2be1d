"""Studies on a real Ray cluster of two nodes. Every start of one takes seconds, so few tests share many questions."""

import os
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from keyhole.core.errors import InputError, KeyholeError, StorageError
from keyhole.record.run import open_run
from keyhole.studies import node
from keyhole.studies.cluster import LOG, Cluster
from keyhole.studies.driver import refuse_if_different
from keyhole.studies.execute import build_executor
from keyhole.studies.join import belongs_to, refuse_if_unreachable
from keyhole.studies.local import Local
from tests.studies.task_helpers import (
    alive,
    as_held,
    audit,
    endings,
    held,
    new_study,
    processes_below,
    step_saved,
    trial,
    unlike,
    wait_until,
)

# Looked for and not imported: Ray reads its settings when it is.
with_ray = pytest.mark.skipif(find_spec("ray") is None, reason="wants the extra: pip install 'keyhole[cluster]'")


def cluster_tests(test):
    """Nodes have a CPU each."""
    return pytest.mark.slow(pytest.mark.alone(with_ray(test)))


@pytest.fixture(scope="module")
def nodes():
    from tests.studies.two_nodes import TwoNodes

    with TwoNodes() as nodes:
        yield nodes


def some_tasks(root):
    """Two trials, one of them with a part that prints, an audit, and three tasks that cannot be carried out."""
    return [
        audit(root, "base"),
        trial(root, "base", 1),
        trial(root, "chatty", 0, model_mixer="code/parts.py:Chatty", model_dropout=0.1),
        trial(root, "Broken", 0, model_mixer="code/parts.py:Broken"),
        trial(root, "Nothing", 0, model_mixer="code/parts.py:Nothing"),
        trial(root, "Deadly", 0, model_mixer="code/parts.py:Deadly"),
    ]


def carry_out(executor, tasks, watch=None):
    events = []

    def seen(event):
        events.append(event)
        if watch is not None:
            watch(event)

    with executor:
        executor.run(tasks, seen)
    return events


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """The same tasks on this machine alone: their directory and what was told of them."""
    root = new_study(tmp_path_factory.mktemp("here"))
    (root.parent / "gate").touch()
    tasks = [*some_tasks(root), *(held(root, "held", seed, root.parent / "gate") for seed in (0, 1))]
    return root, carry_out(Local(root, 2), tasks)


def messages(events):
    return {event.task: event.message for event in events if event.what == "failed"}


@cluster_tests
@pytest.mark.parametrize("shared", [True, False], ids=["in place", "sent back"])
def test_a_cluster_gives_what_this_machine_gives_bit_for_bit(nodes, here, tmp_path, shared, capfd):
    root, told_here = here
    copy = moved(root, tmp_path)
    cluster = Cluster(copy, shared=shared)  # of the machine: `ray start` has left its address
    events = carry_out(cluster, tasks := some_tasks(root))
    assert (cluster.slots, cluster.where) == (2, "Ray cluster of 2 nodes, 2 CPUs")
    assert endings(events) == {name: what for name, what in endings(told_here).items() if "held" not in name}
    assert list(endings(events).values()).count("done") == 3
    assert [unlike(task, root, copy) for task in tasks[:3]] == [[], [], []]
    expected = {name: text.replace(str(root), str(copy)) for name, text in messages(told_here).items()}
    expected["runs/Deadly/seed-0"] = "its worker ended 2 times; see logs/cluster.log"
    assert messages(events) == expected
    assert [event.task for event in events if event.what == "moved"] == ["runs/Deadly/seed-0"]
    for task in tasks[1:3]:
        seen = [event for event in events if event.task == task.name and event.what == "progress"]
        assert seen[-1].progress == 1.0
        assert [event.row["step"] for event in seen if "dev_loss" in event.row] == [4, 8, 12]
    log = (copy / LOG).read_text()
    assert "hello from a part" in log
    assert f"training {copy}" in log if shared else f"training {copy}" not in log
    assert not (copy / node.TOKEN).exists()
    assert [path.name for path in copy.rglob(".*") if path.name != ".lock"] == []
    assert capfd.readouterr() == ("", "")


def moved(root, folder):
    """A study's directory of the same parts, elsewhere. Tasks name the text where it was."""
    new_study(folder)
    return folder / "study"


@cluster_tests
def test_a_trial_whose_node_is_lost_goes_on_elsewhere_and_ends_the_same(nodes, here, tmp_path):
    root, gate = new_study(tmp_path), tmp_path / "gate"
    tasks = [held(root, "held", seed, gate) for seed in (0, 1)]
    going = set()

    def watch(event):
        if event.what == "progress":
            going.add(event.task)
        if len(going) == 2 and not gate.exists():
            wait_until(lambda: all(step_saved(root, task, 6) for task in tasks), "both trials' second save")
            nodes.lose_one()
            gate.touch()

    try:
        events = carry_out(Cluster(root, nodes.address), tasks, watch)
    finally:
        nodes.add_one()
    assert set(endings(events).values()) == {"done"}
    assert [event.message for event in events if event.what == "moved"] == ["its node was lost; going on elsewhere"]
    lost = next(event.task for event in events if event.what == "moved")
    assert f"resuming {root / lost}" in (root / LOG).read_text()
    assert [as_held(task, here[0], root) for task in tasks] == [[], []]


@cluster_tests
def test_what_a_stopped_study_has_trained_is_saved_and_goes_on_anywhere(nodes, tmp_path):
    """Nothing is shared: what was trained so far comes back, and travels again when the study goes on."""
    root = new_study(tmp_path)
    # So long that neither is at its end before it hears of the stop, however busy the machine.
    sizes = {"train_steps": 3000, "train_save_every": 1000, "train_eval_every": 1000, "train_log_every": 10}
    tasks = [trial(root, "long", seed, **sizes) for seed in (0, 1)]
    alone = moved(root, tmp_path / "alone")
    assert set(endings(carry_out(Local(alone, 2), tasks)).values()) == {"done"}
    going = set()

    def watch(event):
        if event.what == "progress":
            going.add(event.task)
        if len(going) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(Cluster(root, nodes.address, shared=False), tasks, watch)
    assert all(list((root / task.name / "checkpoints").glob("step-*")) for task in tasks)
    assert [task.result(root) for task in tasks] == [None, None]
    unwanted = trial(root, "unwanted", 2, train_steps=10**6, train_log_every=10)
    cluster = Cluster(root, nodes.address, shared=False)

    def give_up(event):
        if event.task == unwanted.name and event.what == "progress":
            cluster.stop(unwanted.name)

    events = carry_out(cluster, [unwanted, *tasks], give_up)
    assert messages(events) == {}
    assert endings(events) == {unwanted.name: "stopped", **{task.name: "done" for task in tasks}}
    assert "resuming" in (root / LOG).read_text()
    assert [unlike(task, alone, root) for task in tasks] == [[], []]


@pytest.fixture
def no_cluster(monkeypatch):
    """Ray finds no note of a cluster here."""
    with tempfile.TemporaryDirectory(prefix="kh", dir="/tmp") as short:  # the paths of sockets have few letters
        monkeypatch.setenv("RAY_TMPDIR", short)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        yield


@cluster_tests
def test_a_cluster_of_this_machine_is_started_where_there_is_none_and_ends_with_the_study(tmp_path, no_cluster):
    root = new_study(tmp_path)
    task = trial(root, "two", processes=2, train_steps=3)
    with build_executor("ray", root, 2) as cluster:
        assert (cluster.slots, cluster.where) == (2, "Ray on this machine, 2 CPUs")
        (driver,) = (pid for pid in processes_below(os.getpid()) if str(root) in Path(f"/proc/{pid}/cmdline").read_text())
        started = processes_below(driver)
        servers = [pid for pid in started if Path(f"/proc/{pid}/exe").resolve().name in ("gcs_server", "raylet")]
        tokens = {token_of(pid) for pid in servers}
        assert len(servers) == 2
        assert len(tokens) == 1
        assert len(tokens.pop() or "") == 64  # Ray listens on every network
        events = []
        cluster.run([task], events.append)
    assert endings(events) == {task.name: "done"}
    assert open_run(root / task.name).environment["processes"] == 2
    wait_until(lambda: not any(map(alive, started)), "the end of all that was started")


def token_of(pid):
    """The word that this process wants to hear from whoever speaks to it."""
    known = dict(line.split(b"=", 1) for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in line)
    return known[b"RAY_AUTH_TOKEN"] if known.get(b"RAY_AUTH_MODE") == b"token" else None


@with_ray
def test_an_address_without_a_cluster_is_told_in_a_sentence_and_soon(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nothing answers
        port = taken.getsockname()[1]
        with pytest.raises(KeyholeError) as told, build_executor(f"ray://127.0.0.1:{port}", tmp_path, None):
            pass
    assert str(told.value) == (
        f"there is no Ray cluster at ray://127.0.0.1:{port} (connection refused); start one with: ray start --head, "
        "and for ray:// give its client port, 10001 where no other was chosen"
    )


def test_what_is_no_address_is_told():
    for text in ("ray://", "ray://host", "ray://host:port", "ray://:10001"):
        with pytest.raises(InputError, match="no address of a Ray cluster; write host:port, for example ray://10"):
            refuse_if_unreachable(text)


def test_without_the_library_the_command_that_installs_it_is_given(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        InputError, match=r"--on ray needs the ray library; install it with: pip install 'keyhole\[cluster\]'"
    ):
        Cluster(tmp_path).__enter__()


@with_ray
def test_a_cluster_that_is_gone_is_told_and_the_study_can_go_on(tmp_path, monkeypatch):
    root = new_study(tmp_path)
    begins = 'print(\'{"slots": 2, "where": "somewhere"}\', flush=True); input()'
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **given: popen([sys.executable, "-c", begins], **given))
    with Cluster(root) as cluster, pytest.raises(KeyholeError, match=r"the Ray cluster is gone.*go on with --resume"):
        cluster.run([trial(root, "a")], print)


def test_the_note_of_an_address_counts_only_where_something_answers_and_it_is_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert belongs_to() is None
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray/ray_current_cluster").write_text(address + "\n")
        assert belongs_to() == address
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        (tmp_path / "ray/ray_current_cluster").chmod(0o644)
        assert belongs_to() == (address if os.geteuid() == 0 else None)  # root's word is always taken
    monkeypatch.undo()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert belongs_to() is None  # left behind by a cluster that is gone


def test_nodes_of_different_versions_are_refused():
    same = {"keyhole": "0.1.0", "torch": "2.13.0"}
    about = [node.About(address=f"10.0.0.{n}", versions=same, capability="x", shares=False) for n in (1, 2)]
    refuse_if_different(about)
    other = node.About(address="10.0.0.3", versions={**same, "torch": "2.12.1"}, capability="x", shares=False)
    with pytest.raises(InputError, match=r"10\.0\.0\.1 has torch 2\.13\.0 and 10\.0\.0\.3 has 2\.12\.1; install the same"):
        refuse_if_different([*about, other])


def test_data_that_a_node_does_not_have_is_said_to_belong_on_every_node(tmp_path):
    root = new_study(tmp_path)
    task = trial(root, "a")
    node.refuse_missing_data(task)
    (tmp_path / "text.txt").unlink()
    with pytest.raises(InputError, match=r"has no .*text\.txt: a study on a cluster needs its data under the same path"):
        node.refuse_missing_data(task)


def test_what_comes_back_takes_the_place_of_what_was_there_and_lies_nowhere_else(tmp_path):
    (tmp_path / "a/runs/x/seed-0/checkpoints").mkdir(parents=True)
    (tmp_path / "a/runs/x/seed-0/checkpoints/old").write_text("old")
    (tmp_path / "b/runs/x/seed-0").mkdir(parents=True)
    (tmp_path / "b/runs/x/seed-0/new").write_bytes(b"\x00new")
    files = node.pack(tmp_path / "b", "runs/x/seed-0")
    node.unpack(files, tmp_path / "a", "runs/x/seed-0")
    assert sorted(path.name for path in (tmp_path / "a").rglob("*")) == ["new", "runs", "seed-0", "x"]
    assert (tmp_path / "a/runs/x/seed-0/new").read_bytes() == b"\x00new"
    node.unpack({"audits/x.json": b"{}"}, tmp_path / "a", "audits/x")
    assert (tmp_path / "a/audits/x.json").read_bytes() == b"{}"
    for name in ("/etc/x", "runs/x/seed-0/../../../x", "runs/x/seed-1/x", "study.toml", "runs/x/seed-0/..\\x"):
        with pytest.raises(StorageError, match="nothing was written"):
            node.unpack({name: b""}, tmp_path / "a", "runs/x/seed-0")
    assert (tmp_path / "a/runs/x/seed-0/new").read_bytes() == b"\x00new"


@cluster_tests
def test_ray_client_carries_tasks_out_as_well(nodes, here, tmp_path):
    pytest.importorskip("grpc", reason="Ray's client speaks grpc: pip install 'ray[client]'")
    root = moved(here[0], tmp_path)
    task = trial(here[0], "base", 1)
    events = carry_out(Cluster(root, nodes.client), [task])
    assert endings(events) == {task.name: "done"}
    assert unlike(task, here[0], root) == []
