"""Two projects on one scheduler: each is as alone, whatever its people ask for; and quotas hold in a crowd."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from client.cli import run
from client.connection import Scheduler
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import InvalidData, NotFound, NotOwner, QuotaReached, Revoked, RoleForbids, SwarmError
from swarm.job.partition import resolve
from swarm.pki.identity import Application, Identity
from swarm.pki.joining import join
from swarm.pki.names import Role
from swarm.pki.profiles import ENVIRONMENT, find_profile
from swarm.pki.tokens import parse_line
from swarm.process.audit import verify
from swarm.wire import jobs_pb2 as pb
from swarm.wire import members_pb2 as members_pb
from tests.support.processes import Cluster
from tests.support.simulated import Tokens, small_spec, write_text

pytestmark = pytest.mark.timeout(300)


@dataclass
class Projects:
    """A scheduler, jobs of ann (in red) and carl (in blue) of the same name, and a colleague and a viewer of ann's."""

    folder: Path
    cluster: Cluster
    request: pb.SubmitRequest
    contents: dict[str, bytes]
    identities: dict[str, Identity]

    def of(self, name: str) -> Scheduler:
        """A connection as one of them."""
        return Scheduler(self.cluster.address, 30.0, self.identities[name])

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


PEOPLE = {
    "ann": (Role.SUBMITTER, "red"),
    "bob": (Role.SUBMITTER, "red"),
    "vera": (Role.VIEWER, "red"),
    "carl": (Role.SUBMITTER, "blue"),
}


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Projects]:
    folder = tmp_path_factory.mktemp("projects")
    spec = resolve(
        small_spec(write_text(folder), pipeline__stages=1, limits__min_replicas=1),
        vocabulary_size=ByteTokenizer.vocabulary_size,
        stages_if_auto=1,
    )
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
        made = Projects(folder, cluster, request, contents, {"local": admin})
        with made.of("local") as scheduler:
            for name in ("red", "blue"):
                scheduler.create_project(members_pb.ProjectRequest(name=name))
            for name, (role, project) in PEOPLE.items():
                asked = members_pb.CreateTokenRequest(role=role, ttl_s=60.0, uses=1, names=name, project=project)
                line = parse_line(scheduler.create_token(asked).line)
                made.identities[name] = join(line, name, Application(name)).identity
        yield made


def outcome(call: Callable[[], Any]) -> str:
    """ok, or the code and the words of an error."""
    try:
        found = call()
        if isinstance(found, Iterator):
            next(found, None)
    except SwarmError as error:
        return f"{error.code} {error.message} {error.hint}"
    return "ok"


def calls(scheduler: Scheduler, job: str) -> dict[str, str]:
    """What each method that names a job comes to; those that change it last."""
    methods: dict[str, Callable[[], Any]] = {
        "Get": lambda: scheduler.get(job),
        "Watch": lambda: scheduler.watch(job),
        "Logs": lambda: scheduler.logs(pb.LogsRequest(job=job, stage=-1)),
        "Explain": lambda: scheduler.explain(pb.ExplainRequest(about=job)),
        "Checkpoints": lambda: scheduler.checkpoints(job, verify=False),
        "History": lambda: scheduler.history(job),
        "Verify": lambda: scheduler.checkpoints(job, verify=True),
        "Pull": lambda: scheduler.pull(job),
        "Remove": lambda: scheduler.remove(job),
        "Pause": lambda: scheduler.pause(job),
        "Resume": lambda: scheduler.resume(job, "latest", ""),
        "Cancel": lambda: scheduler.cancel(job, ""),
    }
    return {name: outcome(call) for name, call in methods.items()}


def test_a_project_is_as_alone_and_a_colleague_changes_nothing(projects: Projects) -> None:
    projects.send("ann")
    anns = projects.submit("ann")
    unknown = f"demo-{'0' * (len(anns) - len('demo-'))}"
    words = {name: dict[str, str]() for name in ("there", "nowhere")}
    with projects.of("carl") as carl:
        assert carl.jobs(all=True, state="", limit=9)[0] == []
        words["there"], words["nowhere"] = calls(carl, anns), calls(carl, unknown)
        for there, nowhere in ((anns[:-1], unknown[:-1]), (f"red/{anns}", f"nil/{anns}"), ("demo", "none")):
            assert calls(carl, there) == {
                name: told.replace(nowhere, there) for name, told in calls(carl, nowhere).items()
            }
    assert words["there"] == {name: told.replace(unknown, anns) for name, told in words["nowhere"].items()}
    assert {told.partition(" ")[0] for told in words["there"].values()} == {NotFound.code}

    projects.send("carl")
    carls = projects.submit("carl")
    with projects.of("carl") as carl, projects.of("ann") as ann, projects.of("local") as admin:
        assert [carl.get("demo").id, ann.get("demo").id] == [carls, anns]
        assert [one.id for one in carl.jobs(all=True, state="", limit=9)[0]] == [carls]
        seen = {one.id: (one.project, one.owner) for one in admin.jobs(all=True, state="", limit=9)[0]}
        assert seen == {anns: ("red", "submitter/ann"), carls: ("blue", "submitter/carl")}
        assert admin.get("blue/demo").id == carls
        assert [one.name for one in ann.projects()] == ["red"]

    reads = {"Get", "Watch", "Logs", "Explain", "Checkpoints", "History"}
    for name, code in (("bob", NotOwner.code), ("vera", RoleForbids.code)):
        with projects.of(name) as colleague:
            told = calls(colleague, anns)
            assert {method for method, words_ in told.items() if words_ == "ok"} == reads
            verified = told.pop("Verify")
            assert verified.startswith(NotOwner.code)
            assert {words_.partition(" ")[0] for method, words_ in told.items() if method not in reads} == {code}
    with projects.of("ann") as ann:
        assert ann.get(anns).state in ("queued", "placing"), "nobody stopped it"
        told = calls(ann, anns)
        assert {method for method, words_ in told.items() if words_ == "ok"} == set(told) - {"Pull", "Remove"}
        assert "only a job that has ended can be removed" in told["Remove"]
        assert "has no weights to pull yet" in told["Pull"]
    with projects.of("local") as admin:
        assert outcome(lambda: admin.cancel(carls, "")) == "ok"

    for name in ("carl", "bob"):  # of another project, and of its own without a checkpoint
        with pytest.raises(NotFound) as caught:
            projects.submit(name, resume_from=f"{anns}:latest")
        assert ("there is no job" in caught.value.message) == (name == "carl")
    log = projects.folder / "scheduler" / "audit.jsonl"
    assert list(verify(log)) == []
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {one["project"] for one in lines if "submitter/carl" in one["actor"]} == {"blue"}
    assert any(one["result"].startswith(NotOwner.code) and one["project"] == "red" for one in lines)


def test_nobody_learns_of_or_uses_what_others_have_uploaded(projects: Projects) -> None:
    content = b"a secret of red"
    shard = pb.Shard(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))
    nothing = pb.Shard(sha256="0" * 64, size_bytes=len(content))
    request = projects.request
    with projects.of("ann") as ann, projects.of("bob") as bob, projects.of("carl") as carl:
        ann.put_shard(shard, lambda start: [content[start:]])
        assert bob.missing_shards([shard]) == []
        assert carl.missing_shards([shard, nothing]) == [shard, nothing]
        told = []
        for one in (shard, nothing):
            for path in ("shard", "model/tokenizer.json", "model/model.safetensors", "manifest.json"):
                asked = pb.SubmitRequest()
                asked.CopyFrom(request)
                if path == "shard":
                    asked.shards.append(one)
                else:
                    asked.files.append(pb.JobFile(path=path, sha256=one.sha256, size_bytes=one.size_bytes))
                told.append(outcome(lambda asked=asked: carl.submit(asked)).replace(one.sha256, "HASH"))  # type: ignore[misc]
        assert told[:4] == told[4:]
        assert told[0].startswith(InvalidData.code)
        carl.put_shard(shard, lambda start: [content[start:]])
        assert carl.missing_shards([shard, nothing]) == [nothing]


def test_a_quota_of_jobs_is_exact_for_fifty_at_a_time(projects: Projects) -> None:
    projects.send("bob")
    with projects.of("local") as admin:
        before = next(one for one in admin.projects() if one.name == "red").open_jobs
        admin.set_project(members_pb.ProjectRequest(name="red", quota_jobs=before + 7))

        def one_more(number: int) -> str:
            return outcome(lambda: projects.submit("bob", job=f"crowd-{number}"))

        with ThreadPoolExecutor(50) as crowd:
            told = list(crowd.map(one_more, range(50)))
        assert told.count("ok") == 7
        refused = {words.partition(" ")[0] for words in told if words != "ok"}
        assert refused == {QuotaReached.code}
        assert f"project red has {before + 7} open jobs" in one_more(50)

        with projects.of("bob") as bob:
            mine = next(one for one in bob.jobs(all=False, state="", limit=99)[0] if one.owner == "submitter/bob")
            bob.cancel(mine.id, "")
            assert one_more(51) == "ok"
            with pytest.raises(QuotaReached):  # to resume is to open again
                bob.resume(mine.id, "latest", "")


def test_commands_of_a_person(projects: Projects, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def swarm(*words: str, profiles: Path | None = None) -> tuple[int, Any]:
        capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            if profiles is not None:
                patch.setenv(ENVIRONMENT, str(profiles))
            code = run([*words, "--scheduler", projects.cluster.address, "-o", "json", "-q"])
        out, _ = capfd.readouterr()
        told = json.loads(out)
        return code, told.get("data", told.get("error"))

    made = swarm("project", "create", "green", "--quota-jobs", "4", "--quota-bytes", "1.5GiB")
    facts = {"name": "green", "open_jobs": 0, "quota_jobs": 4, "upload_bytes": 0, "quota_bytes": 3 << 29}
    facts |= {"stage_servers": 0, "quota_stage_servers": None}
    assert made == (0, facts)
    assert swarm("project", "set", "green", "--quota-jobs", "0") == (0, facts | {"quota_jobs": None})
    assert [one["name"] for one in swarm("project")[1]] == ["blue", "default", "green", "red"]
    code, token = swarm("token", "create", "--role", "submitter", "--project", "green")
    assert (code, token["project"]) == (0, "green")
    assert swarm("login", "--join", token["line"], "--name", "gina", profiles=tmp_path)[0] == 0
    assert [one["name"] for one in swarm("project", "ls", profiles=tmp_path)[1]] == ["green"]
    assert swarm("ls", "-a", profiles=tmp_path) == (0, [])
    (gina,) = [one for one in swarm("identity", "ls")[1] if one["name"] == "gina"]
    assert gina["project"] == "green"
    assert swarm("project", "create", "mine", profiles=tmp_path)[1]["code"] == RoleForbids.code
    assert swarm("gc", profiles=tmp_path)[1]["code"] == RoleForbids.code
    assert swarm("project", "rm", "green")[1]["message"] == "project green still has 1 member"
    assert swarm("identity", "revoke", "gina")[0] == 0
    assert swarm("project", "rm", "green")[0] == 0
    assert [one["name"] for one in swarm("project")[1]] == ["blue", "default", "red"]
    for words, code in (
        (("project", "rm", "green"), 7),
        (("project", "rm", "red"), 10),
        (("project", "rm", "default"), 10),
        (("project", "create", "red"), 10),
        (("project", "set", "none"), 7),
        (("project", "create"), 2),
        (("project", "set", "red", "--quota-bytes", "much"), 2),
        (("token", "create", "--role", "submitter", "--project", "none"), 7),
        (("token", "create", "--role", "stage-server", "--project", "red"), 2),
    ):
        assert swarm(*words)[0] == code, words


def test_people_are_told_what_their_own_project_used(
    projects: Projects, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    day = int(time.time() // 86_400)
    database = sqlite3.connect(projects.folder / "scheduler" / "scheduler.db", timeout=60)
    with database:
        for name, tokens in (("red", 1_234_567), ("blue", 5)):
            row = (day, name, "submitter/x", 7200.0, tokens, 1 << 31, "1.1")
            database.execute("INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    database.close()

    def sums(rows: Sequence[members_pb.UsageRow]) -> dict[str, float]:
        return {row.project: row.tokens for row in rows}

    for name in ("ann", "vera"):
        with projects.of(name) as reader:
            assert sums(reader.project_usage("", 30)) == {"red": 1_234_567}
            (row,) = reader.project_usage("red", 1)
            assert (row.day, row.owner, row.peer_s) == (day, "submitter/x", 7200.0)
            words = {other: outcome(partial(reader.project_usage, other, 30)) for other in ("blue", "nil")}
            assert words["blue"] == words["nil"].replace("nil", "blue")
            assert words["nil"].startswith(NotFound.code)
    with projects.of("local") as admin:
        assert sums(admin.project_usage("", 30)) == {"blue": 5, "red": 1_234_567}
        asked = members_pb.CreateTokenRequest(role=Role.STAGE_SERVER, ttl_s=60.0, uses=1, names="gpu")
        line = parse_line(admin.create_token(asked).line)
    with Scheduler(projects.cluster.address, 30.0, join(line, "gpu", Application("gpu")).identity) as server:
        assert outcome(lambda: server.project_usage("red", 30)).startswith(RoleForbids.code)

    capfd.readouterr()
    assert run(["project", "usage", "red", "--days", "400", "--scheduler", projects.cluster.address]) == 0
    head, line_ = capfd.readouterr().out.splitlines()
    assert head.split() == ["DAY", "OWNER", "STAGE", "SERVER", "HOURS", "TOKENS", "THROUGH", "RELAYS"]
    today = time.strftime("%Y-%m-%d", time.gmtime(day * 86_400))
    assert line_.split() == [today, "submitter/x", "2.0", "1,234,567", "2.0", "GiB"]
    assert run(["project", "usage", "--days", "0", "--scheduler", projects.cluster.address]) == 2


def test_jobs_are_removed_by_their_owner_once_they_have_ended(
    projects: Projects, capfd: pytest.CaptureFixture[str]
) -> None:
    def swarm(*words: str) -> tuple[int, list[Any]]:
        capfd.readouterr()
        code = run([*words, "--scheduler", projects.cluster.address, "-o", "json", "-q"])
        told = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        return code, [one.get("data", one.get("error")) for one in told]

    with projects.of("local") as admin:
        admin.set_project(members_pb.ProjectRequest(name="blue", quota_jobs=0))
    projects.send("carl")
    jobs = [projects.submit("carl", job=f"old-{number}") for number in range(3)]
    folders = [projects.folder / "scheduler" / "jobs" / job for job in jobs]
    with projects.of("ann") as ann, projects.of("carl") as carl:
        for job in jobs[:2]:
            carl.cancel(job, "")
        held = next(one for one in carl.projects()).upload_bytes
        assert outcome(lambda: ann.remove(jobs[0])).startswith(NotFound.code)
        assert "only a job that has ended can be removed" in outcome(lambda: carl.remove(jobs[2]))
        assert carl.remove(jobs[0]).freed_bytes > 0
        assert outcome(lambda: carl.get(jobs[0])).startswith(NotFound.code)
        assert next(one for one in carl.projects()).upload_bytes == held, "others name the same"
        assert [folder.exists() for folder in folders] == [False, True, True]
        carl.cancel(jobs[2], "")
    code, told = swarm("rm", jobs[2], jobs[1], "none", "--yes")
    assert (code, [one.get("code") for one in told[:1]]) == (7, [NotFound.code])
    assert [one["id"] for one in told[1]] == [jobs[2], jobs[1]]
    assert not any(folder.exists() for folder in folders)
    assert swarm("gc", "--dry-run") == (0, [[]])
    lines = (projects.folder / "scheduler" / "audit.jsonl").read_text().splitlines()
    removed = [one for one in map(json.loads, lines) if one["action"] == "Remove" and one["result"] == "allowed"]
    assert {one["target"] for one in removed} >= set(jobs)


def test_a_project_gets_no_more_stage_servers_than_its_quota_says(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = small_spec(write_text(tmp_path), training__steps=5000, pipeline__stages=2, limits__min_replicas=1)
    spec = resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)
    tokens = Tokens.make(tmp_path / "tokens", spec)
    with Cluster(tmp_path) as cluster:

        def swarm(*words: str) -> Any:
            capfd.readouterr()
            assert run([*words, "--scheduler", cluster.address, "-o", "json", "-q"]) == 0
            return json.loads(capfd.readouterr().out)["data"]

        def until(state: str, servers: int) -> Any:
            deadline_s = time.monotonic() + 300.0
            while True:
                view = cluster.jobs.Get(pb.JobRequest(job=job.id), timeout=60)
                count = sum(len(stage.peers) for stage in view.stages)
                if (view.state, count) == (state, servers):
                    return view
                assert time.monotonic() < deadline_s, (view.state, view.reason, count)
                time.sleep(0.1)

        swarm("project", "set", "default", "--quota-peers", "1")
        cluster.add_servers(3)
        job = cluster.submit(spec, tokens.manifest)
        told = "its project may have 1 stage server more, and the job needs 2"
        assert until("placing", 0).reason == told
        swarm("project", "set", "default", "--quota-peers", "2")
        until("running", 2)
        idle = next(peer.id for peer in cluster.peers() if peer.state == "idle")
        deadline_s = time.monotonic() + 300.0
        told = ""
        while "its project has as many stage servers as its quota allows" not in told:
            assert time.monotonic() < deadline_s, told
            told = " ".join(one.text for one in cluster.jobs.Explain(pb.ExplainRequest(about=idle), timeout=60).facts)
            time.sleep(0.1)
        assert swarm("project")[0]["stage_servers"] == 2
        swarm("project", "set", "default", "--quota-peers", "0")
        until("running", 3)
        cluster.wait_for_step(job.id, 1)

        cluster.channel.close()
        assert cluster.scheduler.stop() in (0, 143)
        cluster._start_scheduler(cluster.address)  # what projects used outlives it
        (used,) = swarm("project", "usage", "default")
        assert used["owner"] == "admin/local"
        assert used["stage_server_seconds"] > 0
        assert used["tokens"] > 0
        (summed,) = swarm("project", "usage")
        assert summed == {name: value for name, value in used.items() if name not in ("day", "owner")}


def test_whoever_is_revoked_is_told_no_more_of_a_job_that_he_follows(projects: Projects) -> None:
    """The role is asked when a call begins, and following lasts for days."""
    asked = members_pb.CreateTokenRequest(role=Role.VIEWER, ttl_s=60.0, uses=1, names="eve", project="blue")
    with projects.of("local") as scheduler:
        line = parse_line(scheduler.create_token(asked).line)
    projects.identities["eve"] = join(line, "eve", Application("eve")).identity
    projects.send("carl")
    job = projects.submit("carl", job="followed")
    with projects.of("eve") as eve, projects.of("local") as admin:
        views = eve.watch(job)
        assert next(views).id == job
        admin.revoke_member("viewer/eve", "she left")
        admin.cancel(job, "")
        assert outcome(lambda: list(views)).startswith(Revoked.code)
