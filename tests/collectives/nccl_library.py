"""A made-up NCCL, in C and in Python, that only writes down what it is asked, a line a call."""

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

from stepmark.cases.comm_case import CommCase
from stepmark.collectives.bench import nccl
from stepmark.ground.dtypes import DType
from stepmark.model.collectives import FACTS, Collective, RedOp

STREAM = 0x5EED
COMM = 0xC0
# C types by letter: p pointer, z size_t, i int.
HOT = {
    "ncclAllReduce": "ppziipp",
    "ncclReduceScatter": "ppziipp",
    "ncclReduce": "ppziiipp",
    "ncclAllGather": "ppzipp",
    "ncclBroadcast": "ppziipp",
    "ncclSend": "pziipp",
    "ncclRecv": "pziipp",
    "ncclGroupStart": "",
    "ncclGroupEnd": "",
    "ncclRedOpDestroy": "ip",
    "ncclCommDestroy": "p",
    "ncclCommAbort": "p",
    "ncclCommDeregister": "pp",
    "ncclCommWindowDeregister": "pp",
}
# Exported by NCCL 2.28 and later; the C library here is an older one.
NEWER = {"ncclAlltoAll": "ppzipp", "ncclGather": "ppziipp", "ncclScatter": "ppziipp"}
C_HEAD = """
#include <stdio.h>
#include <string.h>
#include <stddef.h>
typedef struct { char internal[128]; } Id;
typedef struct { size_t size; unsigned magic, version; int blocking, cga, least, most;
                 const char *net; int share, traffic;
                 const char *name; int collnet, policy; } Config;
static char text[1 << 20]; static size_t used; static char failing[64]; static int quiet;
const char *fake_log(void) { return text; }
void fake_reset(const char *name) { used = 0; text[0] = 0; strcpy(failing, name); quiet = 0; }
void fake_quiet(void) { quiet = 1; }
static int say(const char *name) { return strcmp(failing, name) ? 0 : 5; }
#define LOG(...) used += sprintf(text + used, __VA_ARGS__)
int ncclGetVersion(int *v) { *v = 22809; return 0; }
const char *ncclGetErrorString(int r) { return r == 5 ? "invalid usage" : "?"; }
const char *ncclGetLastError(void *c) { return "message truncated\\n"; }
int ncclGetUniqueId(Id *id) { memset(id, 7, 128); return say("ncclGetUniqueId"); }
int ncclCommInitRank(void **c, int n, Id id, int r) {
  *c = (void *)0xC0; LOG("ncclCommInitRank %d %d %d\\n", n, id.internal[127], r);
  return say("ncclCommInitRank"); }
int ncclCommInitRankConfig(void **c, int n, Id id, int r, Config *k) {
  *c = (void *)0xC0; LOG("ncclCommInitRankConfig %d %d %d size=%zu magic=%x version=%u most=%d"
  " undefined=%d net=%p", n, id.internal[127], r, k->size, k->magic, k->version, k->most,
  k->blocking == k->least && k->share == k->traffic && k->share == k->cga, (void *)k->net);
  if (k->size > 48)
    LOG(" name=%p collnet=%d policy=%d", (void *)k->name, k->collnet, k->policy);
  LOG("\\n"); return 0; }
int ncclRedOpCreatePreMulSum(int *op, void *s, int t, int where, void *c) {
  *op = 1000 + t; LOG("ncclRedOpCreatePreMulSum %02x %d %d %zu\\n", *(unsigned char *)s, t,
  where, (size_t)c); return 0; }
static char pages[3 << 20] __attribute__((aligned(4096))); static int at, no_handle;
void fake_no_handle(int yes) { no_handle = yes; }
int ncclMemAlloc(void **p, size_t n) { *p = pages + (at++ % 2) * (1 << 20);
  LOG("ncclMemAlloc %zu\\n", n); return say("ncclMemAlloc"); }
int ncclMemFree(void *p) { LOG("ncclMemFree %d\\n", (char *)p == pages); return 0; }
int ncclCommRegister(void *c, void *p, size_t n, void **h) { *h = no_handle ? 0 : (void *)0xA1;
  LOG("ncclCommRegister %zu %d %zu\\n", (size_t)c, (char *)p == pages, n);
  return say("ncclCommRegister"); }
int ncclCommWindowRegister(void *c, void *p, size_t n, void **w, int flags) {
  *w = no_handle ? 0 : (void *)0xA2;
  LOG("ncclCommWindowRegister %zu %d %zu %d\\n", (size_t)c, (char *)p == pages, n, flags);
  return 0; }
"""


def c_source() -> str:
    """The fixed part, and one function per line of HOT that prints its arguments."""
    kinds = {
        "p": ("void *", "%zu", "(size_t)"),
        "z": ("size_t ", "%zu", ""),
        "i": ("int ", "%d", ""),
    }
    lines = [C_HEAD]
    for name, letters in HOT.items():
        parameters = ", ".join(f"{kinds[k][0]}a{i}" for i, k in enumerate(letters)) or "void"
        formats = "".join(" " + kinds[k][1] for k in letters)
        values = "".join(f", {kinds[k][2]}a{i}" for i, k in enumerate(letters))
        log = f'if (!quiet) LOG("{name}{formats}\\n"{values});'
        lines.append(f'int {name}({parameters}) {{ {log} return say("{name}"); }}')
    return "\n".join(lines)


class PythonLibrary:
    """The same without a compiler: what ctypes would pass, written down."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failing = ""
        self.newer = False

    def __getattr__(self, name: str) -> Any:
        if name in NEWER and not self.newer:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self._answer(name, arguments)
            if name in HOT or name in NEWER:
                values = [getattr(a, "value", a) or 0 for a in arguments]
                self.lines.append(" ".join([name, *map(str, values)]))
            return 5 if name == self.failing else 0

        call.__name__ = name
        setattr(self, name, call)
        return call

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name.startswith("ncclCommInitRank"):
            arguments[0]._obj.value = COMM
            words = [arguments[1], arguments[2].internal[-1], arguments[3]]
            self.lines.append(" ".join([name, *map(str, words)]))
        elif name == "ncclGetVersion":
            arguments[0]._obj.value = 22809
        elif name == "ncclGetUniqueId":
            ctypes.memset(arguments[0], 7, 128)
        elif name == "ncclRedOpCreatePreMulSum":
            arguments[0]._obj.value = 1000 + arguments[2]
            byte = ctypes.cast(arguments[1], ctypes.POINTER(ctypes.c_ubyte))[0]
            words = [f"{byte:02x}", arguments[2], arguments[3], arguments[4].value]
            self.lines.append(" ".join([name, *map(str, words)]))

    def ncclGetErrorString(self, result: int) -> bytes:  # noqa: N802
        return b"invalid usage"

    def ncclGetLastError(self, comm: Any) -> bytes:  # noqa: N802
        return b"message truncated\n"


class Fake:
    """One library, whatever it is made of."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.is_c = not isinstance(library, PythonLibrary)
        if self.is_c:
            library.fake_log.restype = ctypes.c_char_p

    def reset(self, failing: str = "") -> None:
        if self.is_c:
            self.library.fake_reset(failing.encode())
        else:
            self.library.lines, self.library.failing = [], failing

    @property
    def lines(self) -> list[str]:
        if not self.is_c:
            return list(self.library.lines)
        return self.library.fake_log().decode().splitlines()  # type: ignore[no-any-return]


def c_library(folder: Path) -> Fake | None:
    """The library in C; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    (folder / "fake.c").write_text(c_source())
    out = folder / "libnccl.so.2"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-w", "-o", out, folder / "fake.c"], check=True
    )
    return Fake(nccl.load(str(out)))


def join(n: int, index: int, **limits: int) -> nccl.Communicator:
    return nccl.Communicator(
        num_ranks=n,
        index=index,
        share=lambda mine: mine or bytes([9] * 128),
        path="fake",
        **limits,
    )


def case_of(collective: Collective, n: int = 3, **fields: Any) -> CommCase:
    facts = FACTS[collective]
    fields = {
        "count": 10,
        "dtype": DType.BF16,
        "redop": RedOp.SUM if facts.reduces else RedOp.NONE,
        "root": 1 if facts.rooted else -1,
        "pair": (0, 1) if facts.pair else None,
        **fields,
    }
    n = 2 if facts.pair else n
    return CommCase(collective=collective, num_ranks=n, world_size=n, **fields)
