"""A corpus of hostile checkpoints, written here: every way that we know in which a file could make its reader do something else.

In the style of what scanners of models are tested with. Each case is a function that writes a file or folder and returns it; all
of them would leave a file called `EXECUTED` in the folder if anything in them ran.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

Case = Callable[[Path], Path]

TOUCH = "open('EXECUTED', 'w').close()"
CALLS: list[tuple[str, str, tuple[Any, ...]]] = [
    ("os", "system", ("touch EXECUTED",)),
    ("posix", "system", ("touch EXECUTED",)),
    ("nt", "system", ("echo > EXECUTED",)),
    ("os", "popen", ("touch EXECUTED",)),
    ("os", "execv", ("/bin/touch", ["touch", "EXECUTED"])),
    ("os", "remove", ("precious",)),
    ("os", "mkdir", ("EXECUTED",)),
    ("shutil", "rmtree", ("precious",)),
    ("subprocess", "Popen", (["touch", "EXECUTED"],)),
    ("subprocess", "check_output", (["touch", "EXECUTED"],)),
    ("builtins", "eval", (TOUCH,)),
    ("builtins", "exec", (TOUCH,)),
    ("builtins", "compile", (TOUCH, "x", "exec")),
    ("builtins", "open", ("EXECUTED", "w")),
    ("builtins", "__import__", ("antigravity",)),
    ("builtins", "getattr", ("x", "upper")),
    ("builtins", "setattr", ("x", "y", 1)),
    ("builtins", "map", (len, ["x"])),
    ("__builtin__", "eval", (TOUCH,)),
    ("__main__", "os.system", ("touch EXECUTED",)),
    ("importlib", "import_module", ("antigravity",)),
    ("runpy", "_run_code", (TOUCH, {})),
    ("runpy", "run_path", ("evil.py",)),
    ("pty", "spawn", ("/bin/true",)),
    ("webbrowser", "open", ("http://127.0.0.1:9/",)),
    ("socket", "create_connection", (("127.0.0.1", 9),)),
    ("urllib.request", "urlopen", ("http://127.0.0.1:9/",)),
    ("http.client", "HTTPSConnection", ("127.0.0.1",)),
    ("ctypes", "CDLL", ("evil.so",)),
    ("pickle", "loads", (b"cos\nsystem\n(S'touch EXECUTED'\ntR.",)),
    ("_pickle", "loads", (b"cos\nsystem\n(S'touch EXECUTED'\ntR.",)),
    ("marshal", "loads", (b"\xe3",)),
    ("types", "FunctionType", (None, {})),
    ("types", "CodeType", (0,) * 16),
    ("functools", "partial", (print, "x")),
    ("functools", "reduce", (print, ["x", "y"])),
    ("operator", "attrgetter", ("__class__",)),
    ("operator", "methodcaller", ("__init__",)),
    ("copyreg", "_reconstructor", (object, object, None)),
    ("codecs", "decode", (b"x", "zip")),
    ("timeit", "timeit", (TOUCH,)),
    ("cProfile", "run", (TOUCH,)),
    ("pdb", "run", (TOUCH,)),
    ("bdb", "Bdb.run", (None, TOUCH)),
    ("code", "InteractiveInterpreter.runcode", (None, TOUCH)),
    ("doctest", "debug_script", (TOUCH,)),
    ("site", "execsitecustomize", ()),
    ("pip", "main", (["install", "x"],)),
    ("pkgutil", "resolve_name", ("os:system",)),
    ("tempfile", "mkdtemp", ()),
    ("logging.config", "dictConfig", ({"()": "os.system"},)),
    ("torch", "load", ("x.pt",)),
    ("torch.hub", "load", ("x/y", "z")),
    ("torch.jit", "load", ("x.pt",)),
    ("torch.serialization", "load", ("x.pt",)),
    ("torch.storage", "_load_from_bytes", (b"cos\nsystem\n(S'touch EXECUTED'\ntR.",)),
    ("torch.utils.collect_env", "run", ("touch EXECUTED",)),
    ("torch._utils", "_rebuild_device_tensor_from_numpy", ([1], "f", "cpu", False)),
    ("torch.fx.graph_module", "reduce_graph_module", ({"_code": TOUCH}, "")),
    ("torch.utils._pytree", "treespec_loads", (TOUCH,)),
    ("torch.distributed.rpc", "rpc_sync", ("x", eval)),
    ("torch.multiprocessing", "spawn", (print,)),
    ("torch.cuda", "_lazy_init", ()),
    ("torch.ops", "load_library", ("evil.so",)),
    ("torch.classes", "load_library", ("evil.so",)),
    ("torch.nn.modules.module", "Module.apply", (print,)),
    ("numpy", "load", ("x.npy",)),
    ("numpy", "save", ("EXECUTED", [1])),
    ("numpy.testing._private.utils", "runstring", (TOUCH, {})),
    ("numpy.f2py.crackfortran", "myeval", (TOUCH,)),
    ("numpy.core.multiarray", "fromfile", ("precious",)),
    ("transformers.dynamic_module_utils", "get_class_from_dynamic_module", ("x", "y")),
    ("dill._dill", "_create_function", (TOUCH,)),
    ("joblib.numpy_pickle", "load", ("x",)),
    ("squisher.storage.atomic", "write_file", ("EXECUTED", b"")),
]  # fmt: skip


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _argument(value: Any) -> bytes:
    """The instructions that push an argument; what cannot be written without a class is None."""
    try:
        return pickle.dumps(value, 2)[2:-1]
    except (pickle.PicklingError, TypeError, AttributeError):
        return b"N"


def _forms(module: str, name: str, args: tuple[Any, ...]) -> Iterator[tuple[str, bytes]]:
    """The ways in which a pickle can ask for a call."""
    pushed = b"(" + b"".join(map(_argument, args)) + b"t"
    by_line = f"c{module}\n{name}\n".encode()
    by_stack = _text(module) + _text(name) + b"\x93"
    yield "reduce", b"\x80\x02" + by_line + pushed + b"R."
    yield "stack global", b"\x80\x04" + by_stack + pushed + b"R."
    yield (
        "global from memo",
        b"\x80\x04" + _text(module) + b"\x940" + _text(name) + b"\x940h\x00h\x01\x93" + pushed + b"R.",
    )
    yield "inst", b"(" + b"".join(map(_argument, args)) + f"i{module}\n{name}\n.".encode()
    yield "obj", b"(" + by_line + b"".join(map(_argument, args)) + b"o."
    yield "newobj", b"\x80\x02" + by_line + pushed + b"\x81."
    yield "newobj_ex", b"\x80\x04" + by_stack + pushed + b"}\x92."
    yield "build", b"\x80\x02" + by_line + b")R" + b"}" + _text("__setstate__") + by_line + b"sb."
    yield "state of a call", b"\x80\x02" + by_line + pushed + b"R" + pushed + b"b."
    yield "key", b"\x80\x02}" + by_line + pushed + b"RNs."
    yield "without an end", b"\x80\x02" + by_line + pushed + b"R0" + b"\xff" * 8
    yield "behind the end", b"\x80\x02N." + b"\x80\x02" + by_line + pushed + b"R."
    yield "persistent", b"\x80\x02" + by_line + pushed + b"RQ."
    yield "inside a tensor", b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + by_line + pushed + b"RK\x00)) \x89NtR."


def _zipped(content: bytes, **more: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3\n")
        for name, data in more.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def _written(name: str, data: bytes) -> Case:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return write


def _checkpoint(**files: str | bytes) -> Case:
    """A folder with files in it, given as `name="content"`, dots as double underscores."""

    def write(folder: Path) -> Path:
        target = folder / "checkpoint-1"
        target.mkdir()
        for name, content in files.items():
            place = target / name.replace("__", ".")
            place.write_bytes(content.encode() if isinstance(content, str) else content)
        return target

    return write


def _state() -> bytes:
    buffer = io.BytesIO()
    moments = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    torch.save({"state": {0: moments}, "param_groups": [{"params": [0], "betas": (0.9, 0.999)}]}, buffer)
    return buffer.getvalue()


def cases() -> Iterator[tuple[str, Case]]:
    """Every case with its name."""
    evil = b"cos\nsystem\n(S'touch EXECUTED'\ntR."
    for module, name, args in CALLS:
        for form, data in _forms(module, name, args):
            label = f"{module}.{name} by {form}"
            yield label, _written("x.pt", data if data[:1] == b"\x80" else b"\x80\x02" + data)
            if form == "reduce":
                yield f"{label}, zipped", _written("x.pt", _zipped(data))
                yield f"{label}, as weights", _checkpoint(pytorch_model__bin=_zipped(data), config__json="{}")
                yield (
                    f"{label}, as training_args",
                    _checkpoint(optimizer__pt=_state(), training_args__bin=_zipped(data)),
                )
                yield f"{label}, in a distributed checkpoint", _checkpoint(__metadata=data)
                yield f"{label}, in a Lightning file", _written("x.ckpt", _zipped(data))
    yield "extension registry", _written("x.pt", b"\x80\x02\x82\x01)R.")
    yield "protocol 255", _written("x.pt", b"\x80\xff" + evil)
    yield "protocol 0", _written("x.pt", evil)
    yield (
        "entry outside the archive",
        _written("x.pt", _zipped(b"\x80\x02N.", **{"../../EXECUTED": b"x", "/EXECUTED": b"x"})),
    )
    yield (
        "TorchScript",
        _written(
            "x.pt", _zipped(b"\x80\x02N.", **{"archive/constants.pkl": evil, "archive/code/x.py": TOUCH.encode()})
        ),
    )
    yield "two data.pkl", _written("x.pt", _zipped(b"\x80\x02N.", **{"other/data.pkl": evil}))
    yield "archive behind other bytes", _written("x.pt", evil + _zipped(b"\x80\x02" + evil))
    yield "pickle in front of an archive", _written("x.pt", b"\x80\x02" + evil + _zipped(b"\x80\x02N."))
    yield (
        "checksum and flags that do not fit",
        _written(
            "x.pt",
            _zipped(b"\x80\x02" + evil).replace(b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01"),
        ),
    )
    yield "7z", _written("x.pt", b"7z\xbc\xaf\x27\x1c" + evil)
    yield (
        "object array",
        _written(
            "x.npy", b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(128) + evil
        ),
    )
    code = {"config.json": '{"auto_map": {"AutoModel": "evil.Model"}, "architectures": ["Model"]}', "evil.py": TOUCH}
    yield (
        "code beside a model",
        _checkpoint(optimizer__pt=_state(), **{name.replace(".", "__"): text for name, text in code.items()}),
    )
    yield (
        "chat template",
        _checkpoint(
            optimizer__pt=_state(),
            tokenizer_config__json=json.dumps(
                {"chat_template": "{{ cycler.__init__.__globals__.os.system('touch EXECUTED') }}"}
            ),
        ),
    )
    for target in (
        "../../etc/passwd",
        "/etc/passwd",
        "sub/../../x",
        "..",
        "~/x",
        "file:///etc/passwd",
        "http://127.0.0.1:9/",
    ):
        index = json.dumps({"weight_map": {"a": target}})
        yield f"index to {target}", _checkpoint(model__safetensors__index__json=index, config__json="{}")
        yield f"torch index to {target}", _checkpoint(pytorch_model__bin__index__json=index, config__json="{}")
        yield (
            f"base model {target}",
            _checkpoint(
                optimizer__pt=_state(),
                adapter_config__json=json.dumps({"base_model_name_or_path": target, "peft_type": "LORA"}),
            ),
        )
        yield f"latest {target}", _checkpoint(latest=target)
    header = json.dumps(
        {"__metadata__": {"squisher": '{"kind": "squisher", "!!python/object/apply:os.system": ["touch EXECUTED"]}'}}
    ).encode()
    yield "metadata", _written("x.safetensors", struct.pack("<Q", len(header)) + header)
