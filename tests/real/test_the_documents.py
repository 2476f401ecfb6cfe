"""A reader follows the documents: every command in them is typed here, in their order, or has a reason not to be."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.reader import ROOT, Reader, commands_of

pytestmark = pytest.mark.timeout(1200)

# What is not typed, and why.
LEFT_OUT = {
    r"make .*": "what continuous integration calls itself (.ci/run), and what needs hours",
    r"python -m (benchmarks|tests)\..*": "measurements and tests; benchmarks/tests and make test run their short forms",
    r"python -m pytest .*": "make test runs them",
    r"python -m scheduler\.brain\.replay FILE --against OTHER": "tests/unit/scheduler/brain/test_replay.py",
    r"\. \.venv/bin/activate": "the tests run in that environment",
    r"pip install .*": "the index of packages; tests/real/test_release.py installs the wheel",
    r"ssh .*|swarm stage-server --join LINE --device cuda:0": "needs another machine; cpu is typed for the README",
    r"swarm scheduler --checkpoint-root s3://.*": "a bucket; tests/unit/scheduler/storage/checkpoints/test_catalog.py",
    r"swarm submit( job\.toml)? --dry-run": "tests/integration/test_client.py",
    r"(tailscale|wg) .*|.*\$\(tailscale .*|.* 10\.8\.0\..*": "needs a VPN, and with it root",
    r"swarm up --ray .*": "tests/real/test_ray.py",
    r"swarm up --job job\.toml": "tests/integration/test_up.py",
    r"swarm relay( .*)?|.*--via-relay.*|.* --role relay .*": "tests/integration/test_relay_processes.py",
    r"swarm track .*--to mlflow": "a large package; tests/real/test_tracking.py",
    r"swarm scheduler --certificate-grace DAYS": "tests/unit/scheduler/brain/members/test_enrolment.py",
    r"swarm token create --role ROLE --name NAME": "--name is typed in tests/security/test_who_is_who.py",
    r"swarm identity release NAME": "needs a machine that computes wrong; tests/unit/scheduler/jobs/test_commands.py",
    r"swarm .*mqtts://BROKER.*": "needs a broker with certificates; tests/real/test_brokers_and_databases.py",
    r"mosquitto_sub .*": "needs the package mosquitto-clients; tests/unit/test_references.py holds the topics",
    r"(sqlite3|rsync) .*|swarm scheduler --data-dir BACKUP .*": "tests/integration/test_backup.py",
    r"openssl pkcs12 .*": "needs a page off loopback; tests/unit/scheduler/web/test_pages.py",
    r"swarm ca new": "tests/unit/client/verbs/members/test_ca.py",
    r"swarm (rm|cancel|pause|pull|explain|train-local|status|submit|gc|ca|wait|peers drain|plan|simulate)"
    r"( JOB\.\.\.| --resume-from| --microbatch| --outer-log| --speeds \S+)?": "a name in a sentence",
}
SHORT = "--set training.steps=6 --set training.global_batch_sequences=4 --set data.sequence_length=32"
LONG = SHORT.replace("steps=6", "steps=1000000", 1)
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "SECURITY.md"]
DOCUMENTS += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    with Reader(tmp_path) as reader:
        yield reader


def steps(reader: Reader, job: str) -> list[int]:
    """The steps at which the job has checkpoints."""
    found = json.loads(reader.also(f"swarm checkpoints {job} -o json"))["data"]
    return [int(checkpoint["step"]) for checkpoint in found]


def first_peer(reader: Reader) -> str:
    return str(json.loads(reader.also("swarm peers -o json"))["data"][0]["id"])


def test_the_readme_from_its_first_command_to_its_last(reader: Reader) -> None:
    reader.opens("README.md")
    reader.passes_all(LEFT_OUT)
    reader.starts("swarm up")
    reader.types("swarm submit --example > job.toml")
    reader.types("swarm submit job.toml", SHORT)
    reader.types("swarm pull example ./model")
    reader.passes_all(LEFT_OUT)
    saved = "--set checkpoint.every_steps=2"
    reader.names["JOB"] = reader.also(f"swarm submit job.toml --detach {LONG} {saved} --name long")
    reader.also(f"swarm submit job.toml --detach {LONG} --name other")
    reader.types("swarm ls")
    reader.types("swarm status JOB")
    assert "idle" in (peers := reader.types("swarm peers")) or "serving" in peers
    reader.types("swarm top", "--once")
    reader.names["JOB"] = "example"
    reader.types("swarm track JOB ./runs --follow")
    reader.passes_all(LEFT_OUT)
    reader.types("swarm doctor")
    reader.names["FILE"] = "found"
    reader.types("swarm doctor --bundle FILE.zip")
    assert reader.types("swarm history JOB --csv").count("\n") == 6, "a head and six steps"
    reader.names["JOB"] = "long"
    reader.types("swarm trace JOB")
    reader.names["JOB"] = "example"
    reader.types("swarm logs JOB -f")
    reader.types("swarm peers --links")
    reader.names["COMMAND"] = "true"
    reader.types("swarm wait JOB && COMMAND")
    reader.types("swarm explain JOB")
    reader.names["PEER"] = first_peer(reader)
    reader.types("swarm explain PEER")
    reader.names["JOB"] = "long"
    reader.types("swarm pause JOB")
    reader.names["JOB"] = "other"
    reader.types("swarm cancel JOB")
    reader.names |= {"JOB": "long", "STEP": str(min(steps(reader, "long")))}
    reader.types("swarm resume JOB --set pipeline.stages=3 --from STEP", "--detach")
    reader.types("swarm checkpoints JOB --verify")
    reader.names["JOB"] = "other"
    reader.types("swarm rm JOB", "--yes")  # at a terminal it asks
    reader.types("swarm gc --dry-run")
    reader.also("swarm cancel long")
    reader.names |= {"JOB": "long", "STEP": str(max(steps(reader, "long")))}
    more = f"{SHORT} --set training.steps={max(6, int(reader.names['STEP']) + 2)}"
    reader.types("swarm submit job.toml --resume-from JOB:STEP", more)
    reader.types("swarm peers drain PEER")
    reader.types("swarm peers undrain PEER")
    reader.passes_all(LEFT_OUT)
    reader.types("swarm train-local job.toml", SHORT)
    reader.passes("swarm COMMAND --help")
    reader.also("swarm submit --help")
    reader.types("swarm --install-completion")
    reader.stops()
    reader.starts("swarm scheduler")
    reader.starts("swarm stage-server --scheduler 127.0.0.1:7950 --device cpu")
    reader.stops()
    reader.starts("swarm scheduler --listen SCHEDULER:7950")
    reader.names["LINE"] = f"'{reader.types('swarm token create --role stage-server --scheduler SCHEDULER:7950')}'"
    reader.starts("swarm stage-server --join LINE --listen PEER:7951 --device cuda:0", "--data-dir other-machine")
    reader.names["LINE"] = f"'{reader.types('swarm token create --role submitter --scheduler SCHEDULER:7950')}'"
    reader.sits_at("laptop")
    reader.types("swarm login --join LINE")
    reader.types("swarm submit job.toml --scheduler SCHEDULER:7950", SHORT)
    reader.sits_at("home")
    reader.names["NAME"] = first_peer(reader)
    reader.types("swarm identity ls")
    reader.types("swarm identity revoke NAME", "--yes")
    reader.passes_all(LEFT_OUT)
    reader.closes()


def test_pages_about_jobs_and_members(reader: Reader) -> None:
    reader.opens("docs/checkpoints.md")
    reader.runs("swarm up --stages 3 --replicas 1")
    reader.also("swarm submit --example > job.toml")
    saved = "--set checkpoint.every_steps=2 --set checkpoint.keep_last=1000"
    reader.names["JOB"] = reader.also(f"swarm submit job.toml --detach {LONG} {saved}")
    reader.also("swarm submit job.toml --name short --set limits.max_replicas=1 --detach " + SHORT)
    while not steps(reader, "JOB"):
        reader.also("swarm status JOB")
    at = {"500": str(steps(reader, "JOB")[0])}
    reader.types("swarm checkpoints JOB --verify")
    reader.types("swarm pull JOB ./model")
    reader.types("swarm pull JOB ./model-500 --step 500", where={"--step 500": f"--step {at['500']}"})
    reader.types("swarm pause JOB")
    reader.types("swarm resume JOB --set pipeline.stages=3", "--detach")
    reader.also("swarm pause JOB")
    reader.types("swarm resume JOB --from 500", "--detach", where=at)
    reader.types("swarm submit job.toml --resume-from JOB:500", f"--detach --name second {LONG}", where=at)
    reader.passes_all(LEFT_OUT)
    reader.types("swarm ls")
    reader.passes_all(LEFT_OUT)
    reader.types("swarm gc --dry-run")

    reader.opens("SECURITY.md")
    reader.types("swarm version")
    reader.opens("docs/scheduling.md")
    reader.types("swarm explain JOB")

    reader.opens("docs/reliability.md")
    reader.passes_all(LEFT_OUT)
    reader.names["PEER"] = first_peer(reader)
    reader.types("swarm peers drain PEER", "--no-wait")  # it stays until another one takes its stage
    reader.passes("swarm peers undrain PEER")  # typed for the README, where it has handed its work over
    reader.types("swarm explain PEER")
    reader.names["N"] = "5"
    reader.passes("swarm submit --priority N")
    reader.also(f"swarm submit job.toml --priority N --detach --name third {LONG}")
    reader.types("swarm pause JOB")
    reader.types("swarm resume JOB --set limits.priority=N", "--detach")
    reader.passes_all(LEFT_OUT)
    reader.passes("swarm up")  # it runs
    reader.types("swarm logs JOB")
    reader.types("swarm status JOB")
    reader.passes_all(LEFT_OUT)

    reader.opens("docs/runbook.md")
    reader.types("swarm ls")
    reader.types("swarm explain JOB")
    reader.also("swarm cancel JOB second third")
    reader.types("swarm logs JOB -f")
    reader.types("swarm peers")
    reader.passes("swarm pause JOB")  # with the next one typed below, where a job runs
    reader.passes("swarm resume JOB --set pipeline.stages=N")
    reader.types("swarm islands JOB")
    reader.types("swarm peers --links")
    reader.names |= {"JOB": reader.also(f"swarm submit job.toml --detach --name fourth {LONG} {saved}")}
    while not steps(reader, "JOB"):
        reader.also("swarm status JOB")
    reader.types("swarm peers drain PEER", "--no-wait")
    reader.types("swarm logs JOB --level warning")
    reader.passes_all(LEFT_OUT)
    reader.passes("swarm identity revoke NAME")  # typed at the end: it takes a stage server for good
    reader.types("swarm status JOB")
    reader.also("swarm pause JOB")
    reader.types("swarm resume JOB", "--detach")
    reader.also("swarm pause JOB")
    reader.names["STEP"] = str(steps(reader, "JOB")[0])
    reader.types("swarm resume JOB --from STEP --set training.learning_rate=1e-4", "--detach")
    reader.types("swarm checkpoints JOB")
    reader.also("swarm pause JOB")
    reader.types("swarm resume JOB --set checkpoint.every_s=1800", "--detach")
    reader.types("swarm gc --dry-run")
    reader.passes("swarm rm JOB")  # typed at the end
    reader.also("swarm pause JOB")
    reader.names["N"] = "2"
    reader.also("swarm resume JOB --set pipeline.stages=N --detach")
    reader.passes("swarm scheduler --keep-jobs 30d")  # typed in docs/features.md
    reader.types("swarm identity ls")
    reader.types("swarm token create --role stage-server")
    reader.also("swarm cancel JOB")
    reader.also("swarm rm JOB --yes")

    reader.opens("docs/security.md")
    reader.passes("swarm stage-server")  # in a sentence
    reader.types("swarm doctor")
    reader.names |= {"ROLE": "viewer"}
    reader.types("swarm token create --role ROLE")
    reader.types("swarm peers")
    reader.passes_all(LEFT_OUT)
    reader.passes("swarm identity revoke NAME")  # of the runbook
    reader.types("swarm ca show")
    reader.passes_all(LEFT_OUT)
    (audit,) = reader.folder.glob("home/.local/share/**/audit.jsonl")
    reader.types("swarm audit", str(audit))
    reader.passes_all(LEFT_OUT)
    reader.names["PEER"] = first_peer(reader)
    reader.types("swarm explain PEER")
    reader.passes_all(LEFT_OUT)
    reader.passes("swarm up")  # it runs
    reader.passes_all(LEFT_OUT)
    reader.names["NAME"] = reader.names["PEER"]
    reader.also("swarm identity revoke NAME --yes")
    reader.closes()


def test_pages_that_start_programs(reader: Reader) -> None:
    reader.opens("docs/broker.md")
    reader.starts("swarm scheduler --broker none")
    reader.stops()
    reader.starts("swarm scheduler --broker embedded")
    reader.passes_all(LEFT_OUT)

    reader.opens("docs/networks.md")
    reader.types("swarm doctor --scheduler HOST:7950")
    reader.types("swarm token create --role viewer")
    reader.passes("swarm login --join LINE")  # of the README
    reader.types("swarm peers")
    reader.names["LINE"] = f"'{reader.also('swarm token create --role stage-server --scheduler SCHEDULER:7950')}'"
    peer = reader.runs("swarm stage-server --join LINE --listen PEER:7951 --device cpu")["peer"]
    reader.names["PEER"] = peer
    reader.types("swarm explain PEER")
    reader.stops()
    reader.starts("swarm scheduler --listen SCHEDULER:7950")
    token = reader.types("swarm token create --role stage-server --scheduler SCHEDULER:7950")
    reader.names["LINE"] = f"'{token}'"
    reader.starts("swarm stage-server --join LINE", "--device cpu --data-dir other-machine")
    reader.passes_all(LEFT_OUT)
    token = reader.also("swarm token create --role stage-server --scheduler SCHEDULER:7950")
    reader.names["LINE"] = f"'{token}'"
    reader.starts("swarm stage-server --join LINE --site lyon", "--device cpu --data-dir third-machine")
    reader.passes("swarm explain JOB")  # typed for docs/scheduling.md
    reader.passes_all(LEFT_OUT)
    reader.stops()

    reader.opens("docs/features.md")
    reader.types("swarm submit --example", "> job.toml")
    reader.passes_all(LEFT_OUT)
    reader.passes("swarm ls")  # in a sentence, and typed for docs/operations.md
    reader.passes("swarm status JOB -o json")  # tests/integration/test_train_local.py reads what it prints
    reader.passes_all(LEFT_OUT)
    reader.starts("swarm scheduler --keep-jobs 30d")
    reader.passes_all(LEFT_OUT)
    reader.types("swarm peers --links")
    reader.passes_all(LEFT_OUT)
    reader.stops()

    reader.opens("docs/operations.md")
    reader.passes_all(LEFT_OUT)
    reader.passes("swarm ls")  # in a sentence, and typed below
    reader.passes_all(LEFT_OUT)
    reader.passes("swarm peers")
    reader.passes_all(LEFT_OUT)
    reader.passes("swarm pause JOB")  # of the page about checkpoints, and so is the next
    reader.passes("swarm resume JOB")
    reader.passes_all(LEFT_OUT)
    reader.passes("swarm up")
    reader.passes_all(LEFT_OUT)
    reader.runs("swarm up --stages 2 --replicas 1 --data-dir asked")
    reader.names["JOB"] = reader.also(f"swarm submit job.toml --detach {LONG} --set checkpoint.every_steps=1")
    while not steps(reader, "JOB"):
        reader.also("swarm status JOB")
    reader.types("swarm explain JOB")
    reader.names["PEER"] = first_peer(reader)
    reader.types("swarm explain PEER")
    reader.types("swarm peers --links")
    reader.types("swarm status JOB")
    reader.types("swarm history JOB --csv")
    reader.types("swarm track JOB")
    reader.types("swarm logs JOB --tail 0")
    reader.types("swarm islands JOB")
    reader.types("swarm doctor")
    reader.types("swarm gc --dry-run")
    reader.types("swarm audit", "asked/scheduler/audit.jsonl")
    reader.passes_all(LEFT_OUT)
    reader.also("swarm cancel JOB")
    reader.names["JOB"] = reader.also(f"swarm submit job.toml --detach {SHORT}")
    reader.types("swarm wait JOB && swarm pull JOB ./model", "--force")
    reader.stops()
    reader.passes("swarm trace JOB")
    reader.passes("swarm trace JOB 120")
    reader.passes_all(LEFT_OUT)
    reader.starts("swarm scheduler --otlp http://127.0.0.1:4317 --otlp-ratio 0.01")
    reader.stops()
    reader.passes_all(LEFT_OUT)
    reader.starts("swarm scheduler --record", "--data-dir recorded")
    reader.runs("swarm stage-server --scheduler HOST:7950 --device cpu")
    stages = "--set pipeline.stages=1 --set checkpoint.every_steps=1"
    reader.names["JOB"] = reader.also(f"swarm submit job.toml --detach {LONG} {stages}")
    while not steps(reader, "JOB"):
        reader.also("swarm status JOB")
    reader.also("swarm ls --all")
    reader.also("swarm peers")
    reader.also("swarm trace JOB")
    newest = json.loads(reader.also("swarm status JOB -o json"))["data"]["step"]
    reader.also(f"swarm trace JOB {newest - 1}")
    reader.also("swarm cancel JOB")
    (recording,) = reader.folder.glob("recorded/jobs/*/brain-*.jsonl")
    reader.names["FILE"] = str(recording)
    reader.types("python -m scheduler.brain.replay FILE")
    reader.types("python -m scheduler.brain.replay FILE --story 2:3", where={"2:3": "2:0"})
    reader.passes_all(LEFT_OUT)
    reader.stops()
    reader.closes()


def test_the_page_about_islands(reader: Reader) -> None:
    reader.opens("docs/islands.md")
    reader.also("swarm submit --example > job.toml")
    few = f"{SHORT} --set outer.every_steps=2"
    reader.runs("swarm up --stages 2 --replicas 1")
    reader.passes_all(LEFT_OUT)
    reader.types("swarm submit job.toml --set averaging.mode=diloco --set islands.count=2", few)
    reader.types("swarm train-local job.toml --set averaging.mode=diloco --set islands.count=2", few)
    reader.types("swarm submit --example")
    reader.stops()
    text = (reader.folder / "job.toml").read_text().replace("steps = 200 ", "steps = 6 ")
    text = text.replace("global_batch_sequences = 32", "global_batch_sequences = 4")
    (reader.folder / "job.toml").write_text(text.replace("sequence_length = 128", "sequence_length = 32"))
    reader.passes("swarm up --stages 2 --replicas 1 --islands 2 --job job.toml")
    reader.names["JOB"] = reader.also("swarm up --stages 2 --replicas 1 --islands 2 --job job.toml --data-dir islands")
    reader.runs("swarm up --stages 2 --replicas 1 --islands 2 --data-dir islands")
    reader.types("swarm islands JOB")
    reader.types("swarm status JOB")
    reader.types("swarm explain JOB")
    reader.types("swarm peers")
    far = "swarm up --stages 2 --replicas 1 --islands 2 --between 50Mbit,100ms --job job.toml"
    reader.passes(far)  # tests/integration/test_up.py
    reader.passes_all(LEFT_OUT)
    lyon = "swarm stage-server --scheduler SCHEDULER:7950 --site lyon --listen PEER:7951"
    reader.names["PEER"] = reader.starts(lyon, "--device cpu --data-dir lyon")["peer"]
    reader.types("swarm explain PEER")
    reader.passes_all(LEFT_OUT)
    reader.types("swarm pull JOB ./model")
    reader.passes("swarm train-local job.toml --outer-log ./model/outer-log.jsonl")  # written if an island was lost
    reader.passes_all(LEFT_OUT)
    saved = "--set checkpoint.every_steps=2 --set checkpoint.keep_last=100"
    together = f"--name together --detach {LONG} {saved}"
    reader.names["JOB"] = reader.types("swarm submit job.toml --set checkpoint.every_steps=50", together)
    while not steps(reader, "JOB"):
        reader.also("swarm status JOB")
    reader.types("swarm pause JOB")
    at = next(step for step in steps(reader, "JOB") if step % 2 == 0)
    apart = "--name apart --set averaging.mode=diloco --set islands.count=2 --resume-from JOB:100"
    more = f"{few} --set training.steps={at + 6}"
    reader.types(f"swarm submit job.toml {apart}", more, where={"100": str(at)})
    reader.passes_all(LEFT_OUT)
    reader.closes()


def test_the_page_about_planning(reader: Reader) -> None:
    """With one machine in the place of several alike, and little effort."""
    folder = reader.folder / "examples" / "planning"
    shutil.copytree(ROOT / "examples" / "planning", folder)
    pool = re.sub(r"count = \d+", "count = 1", (folder / "pool.toml").read_text())
    (folder / "pool.toml").write_text(pool)
    (reader.folder / "docs").mkdir()
    few = "--effort 300"
    example = "swarm plan examples/planning/job.toml --pool examples/planning/pool.toml"
    reader.opens("docs/planning.md")
    reader.passes_all(LEFT_OUT)
    reader.types(example, few)
    reader.runs("swarm up --stages 2 --replicas 1")
    reader.types("swarm peers pool > pool.toml")
    reader.types("swarm peers")
    reader.stops()
    reader.types(f"{example} --output json > plan.json", few)
    reader.types(f"{example} --picture docs/planning.svg", few)
    reader.passes("swarm submit examples/planning/job.toml --plan plan.json")  # tests/integration/test_client.py
    better = "examples/planning/better.toml"
    reader.types(f"""sed 's/"1Gbit"/"2Gbit"/' examples/planning/pool.toml > {better}""")
    reader.types(f"swarm plan examples/planning/job.toml --pool {better} --compare plan.json", few)
    reader.types(f"{example} --by price", few)
    reader.types(f"{example} --set averaging.mode=diloco", few)
    reader.passes_all(LEFT_OUT)
    shutil.copytree(folder, reader.folder, dirs_exist_ok=True)
    simulated = "swarm simulate job.toml --pool pool.toml --hours 4 --churn 0.2 --also pipeline.overlap=0"
    reader.types(simulated, where={"--hours 4": "--hours 0.02"})
    reader.passes_all(LEFT_OUT)
    reader.closes()


def test_no_other_page_has_commands_that_nobody_types() -> None:
    walked = set(re.findall(r'reader\.opens\("(.*)"\)', Path(__file__).read_text()))
    typed = {command for document in walked for command in commands_of((ROOT / document).read_text())}
    left = {
        page: [line for line in commands_of((ROOT / page).read_text()) if line not in typed and not _reason(line)]
        for page in DOCUMENTS
        if page not in walked
    }
    assert {document: commands for document, commands in left.items() if commands} == {}


def test_each_reason_is_that_of_a_command() -> None:
    all_ = {line for document in DOCUMENTS for line in commands_of((ROOT / document).read_text())}
    assert [pattern for pattern in LEFT_OUT if not any(re.fullmatch(pattern, line) for line in all_)] == []
    named = {name for reason in LEFT_OUT.values() for name in re.findall(r"tests/[\w./]+", reason)}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def _reason(command: str) -> str:
    return next((reason for pattern, reason in LEFT_OUT.items() if re.fullmatch(pattern, command)), "")
