"""What a type checker sees of jtops: a user's wrong calls are flagged, the right ones are not (case 106)."""

import re
import subprocess
import sys
from pathlib import Path

USER_CODE = Path(__file__).parent / "typing" / "user_code.py"


def test_wrong_calls_are_flagged(tmp_path):
    command = [sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={tmp_path}", "--no-error-summary", str(USER_CODE)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=USER_CODE.parent.parent.parent)
    flagged = {(int(line), code) for line, code in re.findall(r"user_code\.py:(\d+): error: .*\[([\w-]+)\]", run.stdout)}
    lines = enumerate(USER_CODE.read_text().splitlines(), 1)
    assert flagged == {(i, wrong[1]) for i, text in lines if (wrong := re.search(r"# wrong: ([\w-]+)", text))}, run.stdout
