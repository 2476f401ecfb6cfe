"""People on one scheduler: they see every job, change their own, and use nothing that others have sent."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from client.cli import run
from client.connection import Scheduler
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import InvalidData, NotFound, NotOwner, QuotaReached, Revoked, RoleForbids, SwarmError
from swarm.limits import JOBS_OPEN_OF_ONE_MAX
from swarm.pki.identity import Identity
from swarm.pki.names import Role
from swarm.pki.profiles import find_profile
from swarm.wire import jobs_pb2 as pb
from swarm.wire import members_pb2 as members_pb
from tests.support.processes import Cluster
from tests.support.scenes import resolved
from tests.support.services import until
from tests.support.simulated import Tokens, small_spec, write_text

pytestmark = pytest.mark.timeout(300)


@dataclass
class People:
    """A scheduler, the submitters ann and carl, a viewer, and the local admin."""

    folder: Path
    cluster: Cluster
    request: pb.SubmitRequest
    contents: dict[str, bytes]
    identities: dict[str, Identity]

    def of(self, name: str) -> Scheduler:
        """A connection as one of them."""
        return Scheduler(self.cluster.address, 30.0, self.identities[name])

    def joins(self, name: str, role: Role) -> None:
        self.identities[name] = self.cluster.member(role, name)

    def send(self, name: str) -> None:
        with self.of(name) as scheduler:
            for sha256, content in self.contents.items():
                scheduler.put_shard(
                    pb.Shard(sha256=sha256, size_bytes=len(content)), lambda start, content=content: [content[start:]]
                )

    def submit(self, name: str, **values: str) -> str:
        spec = json.loads(self.request.spec_json)
        spec |= {"name": values.pop("job", "demo")}
        spec["checkpoint"] |= values
        request = pb.SubmitRequest()
        request.CopyFrom(self.request)
        request.spec_json = json.dumps(spec)
        with self.of(name) as scheduler:
            return scheduler.submit(request).id


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[People]:
    folder = tmp_path_factory.mktemp("people")
    spec = resolved(small_spec(write_text(folder), pipeline__stages=1, limits__min_replicas=1))
    tokens = Tokens.make(folder / "tokens", spec)
    manifest = tokens.manifest
    request = pb.SubmitRequest(
        spec_json=spec.model_dump_json(),
        shards=[pb.Shard(sha256=shard.sha256) for shard in manifest.shards],
        token_dtype=manifest.token_dtype,
        vocabulary_size=manifest.vocabulary_size,
        unigram_entropy=manifest.unigram_entropy,
        end_of_text=manifest.end_of_text,
        tokenizer_files=ByteTokenizer().tokenizer_files(),
    )
    with Cluster(folder) as cluster:
        admin = find_profile(cluster.address)
        assert admin is not None
        contents = {shard.sha256: shard.path.read_bytes() for shard in manifest.shards}
        made = People(folder, cluster, request, contents, {"local": admin})
        made.joins("ann", Role.SUBMITTER)
        made.joins("carl", Role.SUBMITTER)
        made.joins("vera", Role.VIEWER)
        yield made


def audited(people: People) -> list[Any]:
    """The lines of both audit logs."""
    files = ((people.folder / "scheduler" / f"{name}.jsonl").read_text() for name in ("audit", "admin"))
    return [json.loads(line) for file in files for line in file.splitlines()]


def outcome(call: Callable[[], Any]) -> str:
    """ok, or the code and the words of an error."""
    try:
        found = call()
        if isinstance(found, Iterator):
            next(found, None)
    except SwarmError as error:
        return f"{error.code} {error.message} {error.hint}"
    return "ok"


def cancel(scheduler: Scheduler, job: str) -> None:
    scheduler.call("Cancel", pb.CancelRequest(job=job))


def missing(scheduler: Scheduler, shards: list[pb.Shard]) -> list[pb.Shard]:
    return list(scheduler.call("MissingShards", pb.ShardList(shards=shards)).shards)


def calls(scheduler: Scheduler, job: str) -> dict[str, str]:
    """What each method that names a job comes to; those that change it last."""
    named = pb.JobRequest(job=job)
    methods: dict[str, Callable[[], Any]] = {
        "Get": lambda: scheduler.call("Get", named),
        "Watch": lambda: scheduler.follow(job, print),
        "Logs": lambda: scheduler.logs(pb.LogsRequest(job=job, stage=-1)),
        "Explain": lambda: scheduler.call("Explain", pb.ExplainRequest(about=job)),
        "Checkpoints": lambda: scheduler.checkpoints(job),
        "History": lambda: scheduler.history(job),
        "Verify": lambda: scheduler.checkpoints(job, verify=True),
        "Pull": lambda: scheduler.pull(job),
        "Remove": lambda: scheduler.call("Remove", named),
        "Pause": lambda: scheduler.call("Pause", named),
        "Resume": lambda: scheduler.call("Resume", pb.ResumeRequest(job=job, **{"from": "latest"})),
        "Cancel": lambda: cancel(scheduler, job),
    }
    return {name: outcome(call) for name, call in methods.items()}


def test_people_see_every_job_and_change_their_own(people: People) -> None:
    people.send("ann")
    anns = people.submit("ann")
    reads = {"Get", "Watch", "Logs", "Explain", "Checkpoints", "History"}
    for name, code in (("carl", NotOwner.code), ("vera", RoleForbids.code)):
        with people.of(name) as other:
            assert [(job.id, job.owner) for job in other.jobs(all=True, limit=9)[0]] == [(anns, "submitter/ann")]
            told = calls(other, anns)
            assert {method for method, words in told.items() if words == "ok"} == reads
            assert told.pop("Verify").startswith(NotOwner.code)
            assert {words.partition(" ")[0] for method, words in told.items() if method not in reads} == {code}
    with people.of("ann") as ann:
        assert ann.get(anns).state in ("queued", "placing"), "nobody stopped it"
        told = calls(ann, anns)
        assert {method for method, words in told.items() if words == "ok"} == set(told) - {"Pull", "Remove"}
        assert "only a job that has ended can be removed" in told["Remove"]
        assert "has no weights to pull yet" in told["Pull"]
    people.send("carl")
    carls = people.submit("carl", job="other")
    with people.of("local") as admin:
        assert outcome(lambda: cancel(admin, carls)) == "ok"
    wanted = {"Cancel", "Pause", "Resume", "Pull", "Remove", "Checkpoints"}

    def refused() -> bool:
        return {entry["action"] for entry in audited(people) if entry["result"].startswith(NotOwner.code)} >= wanted

    until("a thread has written the log", refused)
    (submit,) = [entry for entry in audited(people) if entry["action"] == "Submit" and entry["target"] == anns]
    assert submit["actor"].endswith("submitter/ann")


def test_nobody_starts_from_the_weights_of_others(people: People) -> None:
    """What a job starts from its owner can pull from it."""
    people.send("ann")
    people.send("carl")
    anns = people.submit("ann", job="trained")
    for reference in (anns, "trained"):
        with pytest.raises(NotOwner, match=f"Start is for the person who submitted job {anns}"):
            people.submit("carl", resume_from=f"{reference}:latest")
        with pytest.raises(NotFound, match="has no checkpoint"):
            people.submit("ann", resume_from=f"{reference}:latest")


def test_submits_at_the_same_time_open_no_more_jobs_than_one_person_may_have(people: People) -> None:
    people.joins("dora", Role.SUBMITTER)
    people.send("dora")
    tries = JOBS_OPEN_OF_ONE_MAX + 6
    with people.of("dora") as one, people.of("dora") as other, ThreadPoolExecutor(tries) as threads:

        def submit(number: int) -> str:
            return outcome(lambda: (one if number % 2 else other).submit(people.request))

        told = Counter(threads.map(submit, range(tries)))
        mine = [job.id for job in one.jobs(all=False, limit=1000)[0] if job.owner.endswith("/dora")]
        for job in mine:
            one.call("Cancel", pb.CancelRequest(job=job, no_checkpoint=True))
    assert (told["ok"], len(mine)) == (JOBS_OPEN_OF_ONE_MAX, JOBS_OPEN_OF_ONE_MAX), told
    assert all(words == "ok" or words.startswith(QuotaReached.code) for words in told), told


def test_two_open_jobs_of_one_name_are_told_apart_by_id(people: People) -> None:
    people.send("ann")
    people.send("carl")
    both = [people.submit(name, job="same") for name in ("ann", "carl")]
    with people.of("ann") as ann:
        for call in (lambda: ann.get("same"), lambda: cancel(ann, "same")):
            told = outcome(call)
            assert told.startswith(NotFound.code)
            assert all(job in told for job in both)
        cancel(ann, both[0])
        assert ann.get("same").id == both[1]


def test_nobody_learns_of_or_uses_what_others_have_uploaded(people: People) -> None:
    content = b"a secret of ann"
    shard = pb.Shard(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
    nothing = pb.Shard(sha256="0" * 64, size_bytes=len(content))
    request = people.request
    with people.of("ann") as ann, people.of("carl") as carl:
        ann.put_shard(shard, lambda start: [content[start:]])
        assert missing(ann, [shard]) == []
        assert missing(carl, [shard, nothing]) == [shard, nothing]
        told = []
        for upload in (shard, nothing):
            for path in ("shard", "model/tokenizer.json", "model/model.safetensors", "manifest.json"):
                asked = pb.SubmitRequest()
                asked.CopyFrom(request)
                if path == "shard":
                    asked.shards.append(upload)
                else:
                    asked.files.append(pb.JobFile(path=path, sha256=upload.sha256, size_bytes=upload.size_bytes))
                told.append(outcome(lambda asked=asked: carl.submit(asked)).replace(upload.sha256, "HASH"))  # type: ignore[misc]
        assert told[:4] == told[4:]
        assert told[0].startswith(InvalidData.code)
        carl.put_shard(shard, lambda start: [content[start:]])
        assert missing(carl, [shard, nothing]) == [nothing]


def test_jobs_are_removed_by_their_owner_once_they_have_ended(
    people: People, capfd: pytest.CaptureFixture[str]
) -> None:
    def swarm(*words: str) -> tuple[int, list[Any]]:
        capfd.readouterr()
        code = run([*words, "--scheduler", people.cluster.address, "-o", "json", "-q"])
        told = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        return code, [answer.get("data", answer.get("error")) for answer in told]

    people.send("carl")
    jobs = [people.submit("carl", job=f"old-{number}") for number in range(3)]
    folders = [people.folder / "scheduler" / "jobs" / job for job in jobs]
    with people.of("ann") as ann, people.of("carl") as carl:
        for job in jobs[:2]:
            cancel(carl, job)
        assert outcome(lambda: ann.call("Remove", pb.JobRequest(job=jobs[0]))).startswith(NotOwner.code)
        assert "only a job that has ended can be removed" in outcome(
            lambda: carl.call("Remove", pb.JobRequest(job=jobs[2]))
        )
        assert carl.call("Remove", pb.JobRequest(job=jobs[0])).freed_bytes > 0
        assert outcome(lambda: carl.get(jobs[0])).startswith(NotFound.code)
        shards = [pb.Shard(sha256=sha256) for sha256 in people.contents]
        assert missing(carl, shards) == [], "others name the same"
        assert [folder.exists() for folder in folders] == [False, True, True]
        cancel(carl, jobs[2])
    code, told = swarm("rm", jobs[2], jobs[1], "none", "--yes")
    assert (code, [error.get("code") for error in told[:1]]) == (7, [NotFound.code])
    assert [view["id"] for view in told[1]] == [jobs[2], jobs[1]]
    assert not any(folder.exists() for folder in folders)
    assert swarm("gc", "--dry-run") == (0, [[]])
    until(
        "the log",
        lambda: {entry.get("target") for entry in audited(people) if entry["action"] == "Remove"} >= set(jobs),
    )


def test_a_revoked_person_is_told_no_more_of_a_job_that_he_follows(people: People) -> None:
    """The role is asked when a call begins, and following lasts for days."""
    people.joins("eve", Role.VIEWER)
    people.send("carl")
    job = people.submit("carl", job="followed")
    with people.of("eve") as eve, people.of("local") as admin:
        views = eve.follow(job, print)
        assert next(views).id == job
        admin.call("RevokeMember", members_pb.RevokeMemberRequest(name="viewer/eve", reason="she left"))
        cancel(admin, job)
        assert outcome(lambda: list(views)).startswith(Revoked.code)
