"""The corpus of hostile checkpoints, read in a process that notes every execution, import, write and connection."""

import json
import subprocess
import sys
from pathlib import Path

from tests.storage import hostile

AUDITED = """
import json, os, sys, tempfile, warnings
from pathlib import Path
warnings.simplefilter("ignore")
for extra in ("transformers", "peft", "h5py", "orbax", "tensorstore", "jax", "huggingface_hub"):
    sys.modules[extra] = None  # what we would import ourselves to name parameters
import torch, squisher
from squisher import patch
from squisher.storage import safetensors, torch_files
from squisher.storage.folders import open_model
from tests.storage import hostile

READERS = {
    "extract": squisher.extract, "load": squisher.load, "open_model": open_model, "mask": squisher.mask.load,
    "patch": lambda path: patch.apply({"w": torch.zeros(2)}, path), "torch file": torch_files.read,
    "safetensors": safetensors.open_safetensors,
}
watching, seen, where = False, [], ""
NEVER = ("exec", "compile", "import", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile",
         "subprocess.Popen", "socket.", "urllib.Request", "http.client", "ftplib", "smtplib", "ctypes.", "pickle.find_class",
         "marshal.", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
         "os.utime", "os.kill", "os.putenv", "shutil.", "tempfile.", "webbrowser.open", "code.__new__", "function.__new__", "setopencodehook")

def hook(event, arguments):
    if not watching:
        return
    if event == "open":
        path, _, flags = arguments
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        inside = isinstance(path, (str, bytes, os.PathLike)) and os.path.realpath(os.fsdecode(path)).startswith(folder)
        if writes or not (inside or isinstance(path, int)):
            seen.append((where, event, repr(arguments)[:200]))
    elif event == "import" and sys.modules.get(arguments[0].partition(".")[0], "") is None:
        pass  # an extra of ours, which is not there
    elif event.startswith(NEVER):
        seen.append((where, event, repr(arguments)[:200]))

def attempt(path):
    refused = 0
    for name, reader in READERS.items():
        try:
            result = reader(path)
            repr(result)
        except squisher.SquisherError:
            refused += 1
    return refused

sys.addaudithook(hook)
count = refusals = 0
selected = sys.argv[1]
with tempfile.TemporaryDirectory() as outer:
    outer = os.path.realpath(outer)
    for number, (where, write) in enumerate([*hostile.cases()][:400:20] + [*hostile.cases()] if selected == "cases" else []):
        # The first few are read unwatched as well, so that what is imported once is imported.
        folder = os.path.join(outer, str(number))
        os.mkdir(folder); os.chdir(folder)
        Path("precious").write_text("x"); Path("evil.py").write_text(hostile.TOUCH)
        path = write(Path(folder))
        before = sorted(p.name for p in Path(folder).rglob("*"))
        watching = number >= 20
        refusals += attempt(path)
        watching = False
        count += number >= 20
        after = sorted(p.name for p in Path(folder).rglob("*"))
        if before != after:
            seen.append((where, "files", repr(after)))
    if selected == "controls":
        folder = outer
        for where, act in {
            "exec": lambda: exec("1"), "import": lambda: __import__("this_module_is_not_there_"), "write": lambda: open(outer + "/x", "w").close(),
            "elsewhere": lambda: open("/etc/hosts").close(), "system": lambda: os.system("true"),
            "connection": lambda: __import__("socket").create_connection(("127.0.0.1", 9), 0.1),
            "pickle": lambda: __import__("pickle").loads(b"cos\\ngetcwd\\n)R."),
        }.items():
            watching = True
            try:
                act()
            except Exception:
                pass
            watching = False
    os.chdir("/")
print(json.dumps({"count": count, "refusals": refusals, "seen": seen}))
"""


def audited(what):
    done = subprocess.run(
        [sys.executable, "-c", AUDITED, what],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nothing_is_executed_imported_written_or_connected():
    result = audited("cases")
    assert result["seen"] == []
    assert result["count"] == len([*hostile.cases()]) > 1000
    assert result["refusals"] > 5 * result["count"]


def test_the_audit_sees_what_it_should():
    assert {where for where, _, _ in audited("controls")["seen"]} == {
        "exec", "import", "write", "elsewhere", "system", "connection", "pickle",
    }  # fmt: skip
