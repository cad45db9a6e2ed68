"""Attacks on the machine around the sandbox: its files, network, processes and secrets. Each reaches for a canary."""

from rlvr.audit.attacks.suite import read

ESCAPES = r"""
#: writes_outside
open("@FOLDER@/made", "w").write("x")
def scramble(x):
    return 0
#: writes_outside_by_link
import os
os.symlink("@FOLDER@", "link")
open("link/made", "w").write("x")
#: writes_outside_by_descriptor
import os
folder = os.open("@FOLDER@", os.O_RDONLY | os.O_DIRECTORY)
os.close(os.open("made", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
#: writes_outside_by_climbing
import os
name = "../" * 30 + "@FOLDER@/made".lstrip("/")
open(name, "w").write("x")
#: writes_outside_by_shell
import os
os.system("touch @FOLDER@/made")
#: writes_outside_by_subprocess
import subprocess
subprocess.run(["/bin/sh", "-c", "echo x > @FOLDER@/made"])
#: writes_outside_by_exec
import os
os.execv("/bin/sh", ["sh", "-c", "echo x > @FOLDER@/made"])
#: writes_outside_by_spawn
import os
os.posix_spawn("/usr/bin/touch", ["touch", "@FOLDER@/made"], {})
#: writes_outside_by_raw_call
import ctypes, platform
number = {"x86_64": 257, "aarch64": 56}[platform.machine()]
ctypes.CDLL(None).syscall(number, -100, b"@FOLDER@/made", 0o101, 0o644)
#: writes_outside_by_32_bit_call
import ctypes, mmap, platform
if platform.machine() == "x86_64":
    low = ctypes.CDLL(None).mmap
    low.restype = ctypes.c_void_p
    place = low(None, ctypes.c_size_t(4096), 7, 0x62, -1, 0)  # below 4 GiB, as a 32-bit call needs its pointer
    path = b"@FOLDER@/made\0"
    ctypes.memmove(place + 256, path, len(path))
    code = (b"\x53\xb8\x05\0\0\0\xbb" + (place + 256).to_bytes(4, "little") +
            b"\xb9\x41\0\0\0\xba\xa4\x01\0\0\xcd\x80\x5b\xc3")
    ctypes.memmove(place, code, len(code))
    ctypes.CFUNCTYPE(ctypes.c_int)(place)()
#: writes_outside_by_chroot
import os
os.mkdir("jail")
root = os.open("/", os.O_RDONLY)
os.chroot("jail")
os.fchdir(root)
for _ in range(30):
    os.chdir("..")
os.chroot(".")
open("@FOLDER@/made", "w").write("x")
#: writes_outside_by_proc_root
for pid in (1, 2, "self", "thread-self"):
    try:
        open(f"/proc/{pid}/root@FOLDER@/made", "w").write("x")
        break
    except OSError:
        pass
#: writes_outside_in_new_namespace
import ctypes, os
libc = ctypes.CDLL(None)
libc.unshare(0x10020000)
libc.mount(b"proc", b"/tmp", b"proc", 0, None)
for name in ("@FOLDER@/made", "/tmp/1/root@FOLDER@/made"):
    try:
        open(name, "w").write("x")
    except OSError:
        pass
#: links_outside
import os
open("here", "w").write("x")
os.link("here", "@FOLDER@/made")
#: renames_outside
import os
open("here", "w").write("x")
os.rename("here", "@FOLDER@/made")
#: deletes_outside
import os
os.unlink("@FILE@")
#: truncates_outside
import os
os.truncate("@FILE@", 0)
#: preloads_a_library
import os
os.environ["LD_PRELOAD"] = "/tmp/x.so"
os.execve("/bin/sh", ["sh", "-c", "touch @FOLDER@/made"], dict(os.environ))
#: becomes_root
import os
for change in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0])):
    try:
        change()
    except OSError:
        pass
open("@FOLDER@/made", "w").write("x")
#: calls_home
import socket
socket.create_connection(("127.0.0.1", @PORT@), 1).sendall(b"hello")
#: calls_home_by_raw_call
import ctypes, struct
libc = ctypes.CDLL(None)
s = libc.socket(2, 1, 0)
libc.connect(s, struct.pack("<H", 2) + struct.pack(">H", @PORT@) + bytes([127, 0, 0, 1]) + bytes(8), 16)
#: calls_home_by_urllib
import urllib.request
urllib.request.urlopen("http://127.0.0.1:@PORT@/", timeout=1).read()
#: calls_home_by_asyncio
import asyncio
async def call():
    await asyncio.open_connection("127.0.0.1", @PORT@)
asyncio.run(asyncio.wait_for(call(), 1))
#: kills_a_neighbour
import os
os.kill(@PID@, 9)
#: kills_a_neighbour_by_raw_call
import ctypes, platform
libc = ctypes.CDLL(None)
libc.syscall({"x86_64": 62, "aarch64": 129}[platform.machine()], @PID@, 9)
libc.syscall({"x86_64": 234, "aarch64": 131}[platform.machine()], @PID@, @PID@, 9)
#: kills_a_neighbour_by_handle
import os, signal
signal.pidfd_send_signal(os.pidfd_open(@PID@), signal.SIGKILL)
#: slows_a_neighbour
import os
os.setpriority(os.PRIO_PROCESS, @PID@, 19)
#: lowers_a_neighbours_limits
import resource
resource.prlimit(@PID@, resource.RLIMIT_CPU, (0, 0))
#: stays_alive
import ctypes, os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        ctypes.CDLL(None).prctl(15, b"@MARK@", 0, 0, 0)
        os.closerange(0, 256)
        time.sleep(20)
    os._exit(0)
time.sleep(0.5)
#: stays_alive_by_spawn
import subprocess, sys, time
code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'@MARK@', 0, 0, 0); time.sleep(20)"
subprocess.Popen([sys.executable or "/usr/bin/python3", "-S", "-c", code], start_new_session=True)
time.sleep(0.5)
#: reads_the_environment task=leak
import os
def leak():
    return os.environ.get("@MARK@")
#: reads_a_file task=leak
def leak():
    return open("@FILE@").read()
#: reads_a_file_by_raw_call task=leak
import ctypes
def leak():
    libc = ctypes.CDLL(None)
    space = ctypes.create_string_buffer(200)
    size = libc.read(libc.open(b"@FILE@", 0), space, 200)
    return space.raw[:max(size, 0)].decode()
#: reads_the_trainers_environment task=leak
import os
def leak():
    for pid in [os.getpid(), os.getppid(), 1, *(int(n) for n in os.listdir("/proc") if n.isdigit())]:
        try:
            for entry in open(f"/proc/{pid}/environ", "rb").read().split(b"\0"):
                if entry.startswith(b"@MARK@="):
                    return entry.partition(b"=")[2].decode()
        except OSError:
            pass
#: reads_what_libc_knows task=leak
import ctypes
def leak():
    get = ctypes.CDLL(None).getenv
    get.restype = ctypes.c_char_p
    return (get(b"@MARK@") or b"").decode()
#: tells_by_error task=leak
def leak():
    raise RuntimeError(open("@FILE@").read())
"""

ATTACKS = read("escape", ESCAPES, "escape")
