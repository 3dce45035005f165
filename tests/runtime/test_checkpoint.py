"""Checkpoints against kills, full disks, flipped bits and second writers. Files alone: no model."""
import errno
import json
import os
import shutil
import signal
import socket
import weakref
from pathlib import Path

import pytest
import safetensors.torch
import torch

from model.errors import UserError
from runtime import checkpoint
from runtime.checkpoint import RunLock, check_same_run, check_space, find, load, required_bytes, save, verify

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "cases"


def state(seed: int) -> dict[str, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return {"embedding": {"master.e": torch.randn(7, 5, generator=g), "m.e": torch.zeros(7, 5)},
            "layer 0": {"master.q": torch.randn(3, 64, generator=g), "v.q": torch.full((3, 64), 1e-42),
                        "hi": torch.randn(9, generator=g).bfloat16(), "empty": torch.empty(0, 4), "count": torch.tensor(7)}}


def write(run_dir, step, keep=2):
    records = [(name, lambda name=name: state(step)[name]) for name in state(step)]
    return save(run_dir, step, records, {"step": step, "config": {"hidden": 64}, "rng": [2 ** 63, 1]}, keep)


def same(path, step):
    meta, records = load(path)
    assert meta == {"step": step, "config": {"hidden": 64}, "rng": [2 ** 63, 1]}
    expected = state(step)
    assert list(records) == list(expected)
    for name, tensors in expected.items():
        got = records[name]
        assert list(got) == list(tensors)
        assert all(got[k].dtype == t.dtype and got[k].shape == t.shape and torch.equal(got[k], t) for k, t in tensors.items())


def test_what_was_saved_comes_back_and_the_safetensors_library_reads_it(tmp_path):
    path = write(tmp_path, 5)
    same(path, 5)
    theirs = safetensors.torch.load_file(path / "layer-0.safetensors")
    assert all(torch.equal(theirs[k], t) for k, t in state(5)["layer 0"].items())
    assert safetensors.safe_open(path / "embedding.safetensors", "pt").metadata() == {"format": "pt"}


def test_records_are_made_one_at_a_time_and_let_go(tmp_path):
    alive = []

    def make(i):
        assert all(ref() is None for ref in alive), "an earlier record is still held"
        t = torch.ones(1000)
        alive.append(weakref.ref(t))
        return {"w": t}
    save(tmp_path, 1, [(f"layer {i}", lambda i=i: make(i)) for i in range(4)], {})
    assert len(alive) == 4


def test_the_loaded_record_is_read_when_asked_for(tmp_path):
    path = write(tmp_path, 5)
    _, records = load(path)
    shutil.copy(path / "embedding.safetensors", path / "layer-0.safetensors")
    assert len(records["embedding"]) == 2
    with pytest.raises(UserError, match="layer-0.safetensors"):
        records["layer 0"]
    with pytest.raises(UserError, match="no record 'layer 9'"):
        records["layer 9"]


class Dead(BaseException):
    """What a killed process does from then on: nothing that reaches the disk."""


def kill_at(patch, k, die):
    """`die` instead of the k-th call of what touches the disk, and of each later one; of a write, half is done."""
    count = 0

    def killing(name, real):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count >= k:
                if count == k and name == "write":
                    real(args[0], args[1][:len(args[1]) // 2])
                die()
            # what was written outlives the process without fsync, which is slow
            return None if name == "fsync" else real(*args, **kwargs)
        return call
    for name in ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir"):
        patch.setattr(os, name, killing(name, getattr(os, name)))


def save_until_dead(run, step, keep, k):
    """True if the save came to its end before the k-th call."""
    def die():
        raise Dead
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, k, die)
        try:
            write(run, step, keep)
        except Dead:
            return False
    return True


def save_in_a_killed_process(run, step, keep, k):
    pid = os.fork()
    if pid == 0:
        try:
            kill_at(pytest.MonkeyPatch(), k, lambda: os.kill(os.getpid(), signal.SIGKILL))
            write(run, step, keep)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL)
    return status == 0


# the next step with the old one kept, in place of the old one, and a step that is there already
@pytest.mark.parametrize(("step", "keep"), [(3, 2), (3, 1), (2, 2)], ids=["next", "alone", "again"])
@pytest.mark.parametrize(("attempt", "every"), [(save_until_dead, 1), (save_in_a_killed_process, 7)], ids=["every", "kill9"])
def test_CKPT1_killed_while_writing(tmp_path, attempt, every, step, keep):
    start, run, newest_steps, k, ended = tmp_path / "start", tmp_path / "run", set(), 1, False
    start.mkdir()
    for s in (1, 2)[-keep:]:
        write(start, s)
    while not ended:
        shutil.copytree(start, run)
        ended = attempt(run, step, keep, k)
        newest, broken = find(run)
        newest_steps.add(at := int(newest.name.removesuffix(".old").split("-")[1]))
        same(newest, at)
        assert all(path.name.endswith(".partial") for path, _ in broken), (k, broken)
        # the next save makes order
        same(write(run, step, keep), step)
        left = sorted(p.name for p in (run / "checkpoints").iterdir())
        assert left == [f"step-{s:08d}" for s in sorted({1, 2, step})[-keep:]], (k, left)
        shutil.rmtree(run)
        k += every
    assert k > 30 and newest_steps == {2, step}, "the kills were meant to hit every call"


def test_CKPT2_the_name_appears_after_all_is_on_the_disk(tmp_path, monkeypatch):
    """Power may go at any instant: what was not fsynced before a rename may be missing behind it."""
    write(tmp_path, 1)
    log, names = [], {}

    def spy(name):
        real = getattr(os, name)

        def call(*args, **kwargs):
            result = real(*args, **kwargs)
            if name == "open":
                names[result] = str(args[0])
            what = names.get(args[0]) if name in ("write", "fsync") else str(args[0])
            log.append((name, what))
            return result
        monkeypatch.setattr(os, name, call)
    for name in ("open", "write", "fsync", "rename"):
        spy(name)
    path = write(tmp_path, 2, keep=1)
    partial = f"{path}.partial"
    published = log.index(("rename", partial))
    files = [f"{partial}/{p.name}" for p in path.iterdir()]
    writes = {f: max(i for i, e in enumerate(log) if e == ("write", f)) for f in files}
    syncs = {f: log.index(("fsync", f)) for f in files}
    assert all(writes[f] < syncs[f] for f in files)
    assert max(syncs.values()) == syncs[f"{partial}/manifest.json"] < log.index(("fsync", partial)) < published
    parent = log.index(("fsync", str(path.parent)))
    removed = log.index(("rename", str(path.parent / "step-00000001")))
    assert published < parent < removed


def test_CKPT4_the_old_one_is_removed_after_the_new_one_is_whole(tmp_path, monkeypatch):
    old = write(tmp_path, 1, keep=1)
    seen = []
    real = checkpoint.verify

    def watching(path, deep):
        seen.append((Path(path).name, deep, old.exists()))
        real(path, deep)
    monkeypatch.setattr(checkpoint, "verify", watching)
    new = write(tmp_path, 2, keep=1)
    assert ("step-00000002.partial", True, True) in seen and ("step-00000002", False, True) in seen
    assert [p.name for p in new.parent.iterdir()] == [new.name]


def test_CKPT4_too_little_room_is_refused_before_training(tmp_path):
    run = tmp_path / "run"
    free = shutil.disk_usage(tmp_path).free
    one = required_bytes([free // 4] * 2)
    check_space(run, one, keep=1, saves=1)
    with pytest.raises(UserError, match=r"GB are free: \d+\.\d+ GB are missing"):
        check_space(run, one, keep=1, saves=2)
    assert not run.exists()
    run.mkdir()
    write(run, 1, keep=1)
    # one is there already, and only one more is beside it at a time
    check_space(run, one, keep=1, saves=9)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file: checkpoints cannot be written"):
        check_space(tmp_path / "file", 1)


@pytest.mark.parametrize(("call", "code"), [("write", errno.ENOSPC), ("fsync", errno.EIO), ("rename", errno.EIO),
                                            ("open", errno.EROFS), ("close", errno.EIO)])
def test_CKPT5_a_disk_that_fails_at_any_call_leaves_the_old_one_whole(tmp_path, monkeypatch, call, code):
    old = write(tmp_path, 1, keep=1)
    real, k = getattr(os, call), 0
    while True:
        k += 1
        left = k

        def failing(*args, **kwargs):
            nonlocal left
            left -= 1
            if left == 0:
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                write(tmp_path, 2, keep=1)
            except UserError as error:
                assert f"step 2 not written: {tmp_path}" in str(error) and os.strerror(code) in str(error)
                assert f"previous checkpoint: {old}" in str(error) or not old.exists()
            if left > 0:
                break
        newest, _ = find(tmp_path)
        same(newest, 2 if newest != old else 1)
        if newest != old:
            break
        assert [p.name for p in old.parent.iterdir()] == [old.name]
    assert k > 1


def test_CKPT5_a_maker_that_fails_leaves_nothing(tmp_path):
    old = write(tmp_path, 1)

    def fails():
        raise InterruptedError("stopped")
    with pytest.raises(InterruptedError):
        save(tmp_path, 2, [("embedding", lambda: state(2)["embedding"]), ("layer 0", fails)], {})
    assert [p.name for p in old.parent.iterdir()] == [old.name]


def test_CKPT5_a_directory_that_was_removed_is_named(tmp_path):
    with pytest.raises(UserError, match="checkpoint of step 1 not written: .*/gone/checkpoints: No such file.*no previous"):
        write(tmp_path / "gone", 1)


def read_all(path):
    _, records = load(path)
    return {name: records[name] for name in records}


@pytest.mark.parametrize("file", ["manifest.json", "meta.json", "embedding.safetensors", "layer-0.safetensors"])
def test_CKPT5_every_damage_is_named_and_the_previous_one_offered(tmp_path, file):
    previous, path = write(tmp_path, 1), write(tmp_path, 2)
    good = (path / file).read_bytes()
    # every 13th byte, a different bit each: header, tensors, padding
    for at in range(0, len(good), 13):
        (path / file).write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1:])
        with pytest.raises(UserError, match=f"{path}/{file}: .*previous checkpoint: {previous}"):
            read_all(path)
        with pytest.raises(UserError):
            verify(path, deep=True)
    for damage in (lambda: (path / file).write_bytes(good[:-1]), lambda: (path / file).write_bytes(good + b"\0"),
                   (path / file).unlink):
        damage()
        with pytest.raises(UserError, match=f"{path}/{file}: .*previous checkpoint: {previous}"):
            load(path)
        newest, broken = find(tmp_path)
        assert newest == previous and broken[0][0] == path and file in broken[0][1]


def test_CKPT5_the_tensor_with_the_flipped_bit_is_named(tmp_path):
    path = write(tmp_path, 1)
    file = path / "layer-0.safetensors"
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    for name, told in json.loads(data[8:8 + length]).items():
        if name == "__metadata__" or told["data_offsets"][0] == told["data_offsets"][1]:
            continue
        at = 8 + length + told["data_offsets"][1] - 1
        data[at] ^= 4
        file.write_bytes(data)
        with pytest.raises(UserError, match=f"layer-0.safetensors: {name}: its checksum is wrong"):
            read_all(path)
        data[at] ^= 4


def test_CKPT6_no_file_holds_a_pickle(tmp_path):
    path = write(tmp_path, 1)
    for file in path.iterdir():
        if file.suffix == ".json":
            json.loads(file.read_bytes(), parse_constant=pytest.fail)
        else:
            safetensors.torch.load(file.read_bytes())
    with pytest.raises(ValueError):
        save(tmp_path, 2, [], {"loss": float("nan")})
    with pytest.raises(TypeError):
        save(tmp_path, 2, [], {"rng": torch.zeros(3)})
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_retention_counts_whole_ones_and_leaves_broken_ones_alone(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step, keep=3)
    (tmp_path / "checkpoints" / "step-00000002" / "meta.json").unlink()
    write(tmp_path, 4, keep=2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000002", "step-00000003", "step-00000004"]
    # a run that went back is not removed by a future it left
    write(tmp_path, 1, keep=1)
    assert find(tmp_path)[0].name == "step-00000001"


def test_left_over_partial_is_named_and_cleaned(tmp_path):
    path = write(tmp_path, 1)
    left = path.with_name("step-00000009.partial")
    shutil.copytree(path, left)
    newest, broken = find(tmp_path)
    assert newest == path and broken == [(left, "was not finished")]
    write(tmp_path, 2)
    assert not left.exists()


def test_find_in_a_directory_without_checkpoints(tmp_path):
    assert find(tmp_path) == find(tmp_path / "nowhere") == (None, [])


def test_bad_tensors_and_names_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="layer-0 w: a contiguous"):
        save(tmp_path, 1, [("layer 0", lambda: {"w": torch.zeros(4, 4).T})], {})
    for names in (["../a"], ["a", "a"], ["é"]):
        with pytest.raises(ValueError, match="names are unique"):
            save(tmp_path, 1, [(name, dict) for name in names], {})


def test_CKPT12_differing_fields_are_listed():
    saved = json.loads(json.dumps({"hidden": 64, "betas": (0.9, 0.95), "data": {"files": ["a"], "seed": 1}, "threads": 4}))
    now = {"hidden": 128, "betas": (0.9, 0.95), "data": {"files": ["a"], "seed": 2}, "threads": 8, "vocab": 5}
    check_same_run(saved, now, ["betas", "data.files"])
    with pytest.raises(UserError, match=r"another run: hidden: 64 -> 128; data.seed: 1 -> 2; vocab: \(not there\) -> 5$"):
        check_same_run(saved, now, ["hidden", "betas", "data.seed", "vocab"])


def test_CKPT13_two_writers(tmp_path):
    here = socket.gethostname()
    locked, tell = os.pipe()
    first = os.fork()
    if first == 0:
        try:
            lock = RunLock(tmp_path)
            os.write(tell, b"1" if lock.stale is None else b"0")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(locked, 1) == b"1"
        with pytest.raises(UserError, match=f"pid {first} on {here} is writing here"):
            RunLock(tmp_path)
    finally:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)
    with RunLock(tmp_path) as lock:
        assert lock.stale == f"pid {first} on {here}"
    with RunLock(tmp_path) as lock:
        assert lock.stale is None


def test_CKPT14_masters_keep_their_bits(tmp_path):
    cases = json.loads((CASES / "masters.json").read_text())
    bits = torch.tensor([int(case["bits"], 16) for case in cases], dtype=torch.int32)
    # NaNs with a payload, -0 and the smallest number are bits too
    odd = torch.tensor([0x7fc00001, -0x80000000, 1, -1], dtype=torch.int32)
    record = {"master.w": bits.view(torch.float32), "m.w": odd.view(torch.float32), "v.w": odd.flip(0).view(torch.float32)}
    first = save(tmp_path, 1, [("layer 0", lambda: record)], {"step": 1})
    meta, records = load(first)
    got = records["layer 0"]
    assert torch.equal(got["master.w"].view(torch.int32), bits)
    assert torch.equal(got["m.w"].view(torch.int32), odd) and torch.equal(got["v.w"].view(torch.int32), odd.flip(0))
    (tmp_path / "b").mkdir()
    second = save(tmp_path / "b", 1, [(name, lambda name=name: records[name]) for name in records], meta)
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()
