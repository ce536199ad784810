"""Where output goes while vLLM starts; no engine runs here, but one that does not start."""

import os
import subprocess
import sys

import pytest

from steerlab.core.errors import EngineError, InputError
from steerlab.engines.vllm._client.log_file import KEPT, is_users, log_of

_NOISY = """
import os, subprocess, sys
from steerlab.engines.vllm._client.log_file import log_of

child = [sys.executable, "-c", "import sys; input(); print('late child'); print('late complaint', file=sys.stderr)"]
log = log_of([])
print("before")
with log.starting():
    print("of this process")
    print("its complaint", file=sys.stderr)
    os.write(1, b"of a C library\\n")
    late = subprocess.Popen(child, stdin=subprocess.PIPE)
    log.say("for the user")
print("after")
late.communicate(b"\\n")
if sys.argv[1] == "fails":
    with log.starting():
        print("(Worker pid=1) ERROR 11-28 20:46:58 [w.py:1] ValueError: no memory is left")
        raise RuntimeError("See the root cause above.")
log.keep()
print("last words")
"""
HIDDEN = ["of this process", "its complaint", "of a C library", "late child", "late complaint"]


def _run(tmp_path, *arguments, **environment):
    script = tmp_path / "noisy.py"
    script.write_text(_NOISY)
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env={**os.environ, "PYTHONUNBUFFERED": "", "STEERLAB_CACHE": str(tmp_path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, sorted((tmp_path / "logs").glob("*.log"))


def test_all_that_is_written_during_a_start_goes_into_one_file_that_is_named(tmp_path):
    done, (log,) = _run(tmp_path, "well")
    assert done.stdout.splitlines() == ["before", "after"]
    assert done.stderr.splitlines() == [f"vLLM starts; its log is in {log}", "for the user"]
    assert sorted(log.read_text().splitlines()) == sorted([*HIDDEN, "last words"])


def test_a_start_that_fails_says_why_and_names_the_file(tmp_path):
    done, (log,) = _run(tmp_path, "fails")
    assert done.returncode == 1
    wanted = f"EngineError: vLLM did not start: ValueError: no memory is left (vLLM's log has more: {log})"
    assert done.stderr.rstrip().endswith(wanted)
    assert "no memory is left" in log.read_text()


@pytest.mark.parametrize("variable", ["VLLM_LOGGING_LEVEL", "VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_CONFIG_PATH"])
def test_who_has_set_up_vllms_logging_gets_it_as_it_is(tmp_path, variable):
    done, files = _run(tmp_path, "well", **{variable: "1"})
    assert not files
    assert set(HIDDEN) <= set((done.stdout + done.stderr).splitlines())
    assert "its log is in" not in done.stderr


@pytest.mark.parametrize("argument", ["logging_config", "log_level", "log_config_file"])
def test_arguments_set_it_up_too(argument):
    assert is_users([argument])
    assert not is_users(["dtype"])


def test_old_files_go_and_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    for number in range(KEPT + 5):
        (folder / f"vllm-20200101-0000{number:02d}-1.log").touch()
    (folder / "notes.log").touch()
    _, files = _run(tmp_path, "well")
    assert len(files) == KEPT + 1
    assert (folder / "notes.log").exists()
    done, _ = _run(tmp_path, "well", STEERLAB_CACHE=str(folder / "notes.log"), TMPDIR=str(tmp_path))
    (fallback,) = tmp_path.glob("vllm-*.log")
    assert done.stderr.startswith(f"vLLM starts; its log is in {fallback}\n")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "cause"), [({"nonsense": 1}, "nonsense"), ({"max_model_len": 10**6}, "max_model_len")]
)
def test_an_argument_that_vllm_refuses_is_one_sentence(start, tiny_path, argument, cause, capfd):
    with pytest.raises(InputError, match=f"vLLM does not start with these arguments: .*{cause}"):
        with start(tiny_path, layers=[1], **argument):
            pass
    written = capfd.readouterr()
    assert len((written.out + written.err).splitlines()) == 1


def test_a_log_of_the_users_is_above():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "INFO")
        log = log_of([])
    with pytest.raises(EngineError, match=r"RuntimeError: it broke \(vLLM's log above has more\)"), log.starting():
        raise RuntimeError("it broke")
