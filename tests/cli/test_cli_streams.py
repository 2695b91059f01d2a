"""Standard streams that are closed, full or read no more: the exit code is that of the command, and words name them."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture
def shell(tmp_path):
    """Run a command line of composer3d in a shell, with its redirections; return exit code, output and errors."""

    def run(line):
        program = f"{sys.executable} -m composer3d {line}"
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=300)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize(
    ("line", "code"), [("completion bash", 0), ("--version", 0), ("no-such-command", 2)], ids=["0", "version", "2"]
)
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams_change_no_exit_code(shell, line, code, closed):
    found, out, err = shell(f"{line} {closed}")
    assert found == code
    assert "Traceback" not in err and "AttributeError" not in err
    if closed == ">&-":
        assert out == "" and bool(err) == bool(code)
    elif closed == "2>&-":
        assert err == "" and bool(out) == (not code)
    else:
        assert (out, err) == ("", "")


def test_a_check_is_made_without_any_stream(shell):
    assert shell("check quickstart >&- 2>&- <&-") == (0, "", "")


def test_init_asks_nothing_where_standard_input_is_closed(shell):
    code, out, err = shell("init <&-")
    assert (code, err) == (0, "") and "quickstart" in out


def test_a_file_that_is_opened_later_gets_no_standard_descriptor(shell, tmp_path):
    # What a library or a child prints would be written into it.
    command = "import composer3d.cli as c; c.main(['completion', 'bash'])"
    probe = f"{command}; f = open('f'); print(f.fileno(), file=open('n', 'w'))"
    (tmp_path / "f").touch()
    subprocess.run(["bash", "-c", f'{sys.executable} -c "{probe}" <&- >&- 2>&-'], cwd=tmp_path, check=True, timeout=300)
    assert int((tmp_path / "n").read_text()) > 2


@pytest.mark.parametrize("line", ["completion bash", "--help", "--version", "init --list", "plan quickstart"])
def test_an_output_that_cannot_be_written_to_is_named(shell, line):
    assert shell(f"{line} > /dev/full") == (
        3,
        "",
        "standard output (/dev/full) cannot be written to: no space left on device\n"
        "try: free space there, or write to another file\n",
    )


def test_an_output_that_is_open_for_reading_alone_is_named(shell):
    told = "standard output (/dev/null) cannot be written to: bad file descriptor\n"
    assert shell("completion bash 1< /dev/null") == (3, "", told)


def test_errors_that_cannot_be_written_leave_the_exit_code(shell):
    assert shell("no-such-command 2> /dev/full") == (2, "", "")
    assert shell("no-such-command > /dev/full 2>&1") == (2, "", "")


def test_a_reader_that_has_seen_enough_is_no_error(shell):
    assert shell("completion bash | true; exit ${PIPESTATUS[0]}") == (0, "", "")
