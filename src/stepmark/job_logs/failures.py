"""Lines by which a job says that it failed, with their meaning and what to do.

Over 250 lines: a table that is read from top to bottom, the special before the general.
"""

import re
from typing import NamedTuple

from stepmark.findings.log_facts import Role


class FailureRule(NamedTuple):
    """`pattern` is searched in a line; `text` is what it means, `action` what to do."""

    rule: str
    role: Role
    pattern: re.Pattern[str]
    text: str
    action: str


def _rule(rule: str, role: Role, pattern: str, text: str, action: str) -> FailureRule:
    return FailureRule(f"failure-{rule}", role, re.compile(pattern), text, action)


FOREIGN = "failure-foreign"
PEER_CLOSED = "failure-peer-closed"
LAUNCHER = "failure-launcher"
SERVICE_THREAD = "failure-service-thread"
XIDS = ("failure-gpu-work-ended", "failure-gpu-xid")  # that need not be a failure
TIMEOUT_ELSEWHERE = "failure-timeout-elsewhere"

# A connection of an HTTP client is none between ranks.
_NO_WEB = r"^(?!.*(?:requests\.exc|urllib3|https?://|HTTPS?Connection|aiohttp|botocore)).*?"

FAILURES: tuple[FailureRule, ...] = (
    # What a healthy job prints as well.
    _rule(
        "foreign",
        Role.REMARK,
        # NCCL's misc/socket.cc and proxy.cc: a connection without its first bytes.
        r"socketFinalizeAccept: wrong|NCCL WARN .*(?:wrong|unexpected) (?:\w+ )?magic",
        "A foreign process (a port scan, monitoring, a health check) connected to a port of "
        "NCCL. NCCL refuses the connection: harmless by itself.",
        "Set NCCL_SOCKET_IFNAME to an interface that scanners do not reach.",
    ),
    _rule(
        "service-thread",
        Role.REMARK,
        # Also after a foreign connection, and while communicators are taken down.
        r"\[Service thread\] (?:Accept failed|Could not receive type)"
        r"|Failed to execute operation Close",
        "A service thread of NCCL lost a connection.",
        "",
    ),
    _rule(
        "retried",
        Role.REMARK,
        # c10d warns of each attempt (IPv6 first), and throws when it gives up.
        r"\[W[\d: .]{0,40}socket\.cpp:\d+\]",
        "A connection was attempted again.",
        "",
    ),
    # What only follows from another failure, before the patterns that it would also fit.
    _rule(
        "aborted",
        Role.CONSEQUENCE,
        r"communicator was aborted|error set by ProcessGroupNCCL|Process group has been aborted"
        r"|Some NCCL operations have failed|To avoid data inconsistency",
        "A rank gave up its communicators after a failure or time-out.",
        "Look at the first failure of the job.",
    ),
    _rule(
        "store-lost",
        Role.CONSEQUENCE,
        r"(?:store->get|TCPStore|sendBytes|recvValue|recvBytes|key-value store)[^\n]*"
        r"(?:Connection reset|Broken pipe|Connection was likely closed|closed by peer)"
        r"|failed to check the \"should dump\" flag",
        "The connection to the TCPStore (rank 0 or torchrun) broke: its process ended first, "
        "or the network failed.",
        "Look at the output of rank 0 and of torchrun on the first node.",
    ),
    _rule(
        "peer-closed",
        Role.CONSEQUENCE,
        _NO_WEB
        + r"(?:Connection closed by (?:remote )?peer|remote process (?:exited|has terminated)"
        r"|[Cc]all to (?:recv|send)\w* (?:from|to) .*(?:Broken pipe|Connection reset)"
        r"|ncclRemoteError|Socket recv failed while polling|\[Proxy Service\S* \d+\] Failed to"
        r"|(?:NCCL WARN|[Ss]ocket|gloo|UCX|\[E\d|\b(?:send|recv)\w*\b|[Ee]rrno).*"
        r"(?:Connection reset by peer|Broken pipe)"
        r"|(?:^|^[\w.]+\.)(?:BrokenPipe|ConnectionReset)Error\b)",
        "A connection to another process was closed: that one ended first, or the network "
        "between them failed.",
        "Look at the logs of the other ranks for an earlier failure, then at the network.",
    ),
    _rule(
        "worker-lost",
        Role.CONSEQUENCE,
        r"WorkerProc initialization failed|Engine core initialization failed|EngineDeadError"
        r"|Exiting gracefully|DataLoader worker \(pid\(s\)|ProcessRaisedException|RayTaskError"
        r"|ActorDiedError|WorkerCrashedError",
        "A parent process reports that one of its workers failed.",
        "Look at the worker's own failure.",
    ),
    # The machine.
    _rule(
        "gpu-lost",
        Role.HARDWARE,
        r"fallen off the bus|Xid \(PCI[^)]*\): 79\b|GPU is lost|GPU has been lost",
        "A GPU is gone from the PCI bus (Xid 79): power, heat, or a hardware fault.",
        "Drain the node; reset or replace the GPU.",
    ),
    _rule(
        "gpu-hardware",
        Role.HARDWARE,
        r"uncorrectable (?:ECC|NVLink)"
        r"|Xid \(PCI[^)]*\): (?:48|64|74|94|95|119|120|140)\b",
        "A GPU reports an uncorrectable hardware error (memory, NVLink or firmware).",
        "Drain the node and look at dmesg and nvidia-smi -q; reset or replace the GPU.",
    ),
    # NVIDIA's catalog of Xids (docs.nvidia.com/deploy/xid-errors): 13, 31 and 43 may be faults
    # of the program, 45 ends the work of a process that failed or was killed.
    _rule(
        "gpu-program",
        Role.CAUSE,
        r"Xid \([^)]*\): (?:13|31|43)\b",
        "A GPU reports an Xid that may be the program's fault, such as an access to memory "
        "that is not its own, or the hardware's.",
        "Run again with compute-sanitizer or CUDA_LAUNCH_BLOCKING=1; if it comes back on this "
        "GPU alone, test the GPU (stepmark doctor --nodes).",
    ),
    _rule(
        "gpu-work-ended",
        Role.REMARK,
        r"Xid \([^)]*\): 45\b",
        "The driver ended the work of a process on a GPU, after a failure of the program or "
        "when it was killed:",
        "Look for an earlier failure of that process, and for other Xids in dmesg.",
    ),
    _rule(
        "gpu-xid",
        Role.REMARK,
        r"Xid \([^)]*\): \d",
        "A GPU reports an Xid:",
        "Look its number up in NVIDIA's catalog (docs.nvidia.com/deploy/xid-errors).",
    ),
    _rule(
        "node-lost",
        Role.HARDWARE,
        r"DUE TO NODE FAILURE|Node failure on|NODE_FAIL|failed health check|Kernel panic"
        r"|(?:ORTE|PRTE) has lost communication with|node \d+ .*requested job terminate",
        "A node failed.",
        "Take the node out and start again from the last checkpoint.",
    ),
    _rule(
        "host-memory",
        Role.HARDWARE,
        r"oom[-_]kill|Out of memory: Kill|emory cgroup out of memory|: Out Of Memory"
        r"|OOMKilled|OOM Killed|TERM_MEMLIMIT|PBS: job killed: v?mem|[Ee]xceeded (?:job|step)"
        r" memory limit|OUT_OF_ME(?:MORY|\+)|node running low on memory",
        "The host or the job's cgroup ran out of memory, and the kernel or the scheduler "
        "killed a process.",
        "Ask for more host memory, or use less: data-loader workers, pinned buffers, offload.",
    ),
    _rule(
        "evicted",
        Role.HARDWARE,
        r"^\s*Reason: +Evicted|\bEvicted\b.*\bkubelet\b"
        r"|node was low on resource|^\S+ +0/\d+ +(?:Evicted|ContainerStatusUnknown) ",
        "Kubernetes evicted the pod: its node ran short of a resource, or was drained.",
        "Look at the event's message (kubectl describe pod), and set requests and limits.",
    ),
    # Causes. What "Cannot allocate memory" means depends on the call that failed.
    _rule(
        "locked-memory",
        Role.CAUSE,
        # ENOMEM of the verbs library: pages cannot be pinned.
        r"(?:ibv_\w+|mlx5dv_reg\w*|fi_mr_reg\w*|register memory|[Mm]emory registration)"
        r".*(?:Cannot allocate memory|ENOMEM)|[Ll]ocked memory limit|RLIMIT_MEMLOCK",
        "Memory could not be registered with the adapter: the limit of locked memory "
        "(ulimit -l) of the process is too low.",
        "Set it to unlimited in the container or the job (--ulimit memlock=-1, LimitMEMLOCK, "
        "PropagateResourceLimitsExcept=MEMLOCK), and check ulimit -l inside the job.",
    ),
    _rule(
        "pinned-memory",
        Role.CAUSE,
        r"(?:cuda|hip)(?:HostAlloc|HostMalloc|MallocHost|HostRegister)\w*.*"
        r"(?:fail|rror|out of memory)|pin(?:ned)? memory.*(?:out of memory|fail)",
        "Pinned host memory could not be allocated.",
        "Use less of it (pin_memory, offload buffers), and look at the host's memory and "
        "ulimit -l.",
    ),
    _rule(
        "process-limit",
        Role.CAUSE,
        r"\b(?:fork|clone|vfork|pthread_create|posix_spawn)\b.*(?:Cannot allocate memory"
        r"|Resource temporarily unavailable)|can't start new thread|pthread_create failed"
        r"|libgomp: Thread creation failed",
        "A process or thread could not be started: a limit of processes (ulimit -u, the "
        "cgroup's pids.max) or of the host's memory.",
        "Raise the limit, or use fewer data-loader workers and threads.",
    ),
    _rule(
        "heap",
        Role.CAUSE,
        r"\*\*\* (?:stack smashing|buffer overflow) detected|double free or corruption"
        r"|\b(?:free|realloc|malloc|munmap_chunk)\(\): \w+|corrupted (?:size vs|double-linked)"
        r"|malloc_consolidate\(\):|corrupted top size",
        "The C library found the memory of a process corrupted and aborted it.",
        "Run again under AddressSanitizer or valgrind; look for extensions and plugins of "
        "another build.",
    ),
    _rule(
        "file-limit",
        Role.CAUSE,
        r"Too many open files|\[Errno 24\]",
        "A process reached its limit of open files (ulimit -n).",
        "Raise it, or use torch.multiprocessing.set_sharing_strategy('file_system').",
    ),
    _rule(
        "shm-attach",
        Role.CAUSE,
        r"attaching to shared memory segment",
        "A rank does not see the shared memory segment of another one of its host: they run in "
        "containers with separate /dev/shm, or it was removed.",
        "Share /dev/shm (--ipc=host), or set NCCL_SHM_DISABLE=1 to confirm.",
    ),
    _rule(
        "shm",
        Role.CAUSE,
        r"(?:shm_open|/dev/shm).*(?:Permission denied|Operation not permitted|Read-only)",
        "A segment in /dev/shm may not be created: the process lacks the right to write there.",
        "Make /dev/shm writable for all (chmod 1777), and remove segments of other users.",
    ),
    _rule(
        "shm",
        Role.CAUSE,
        r"creating shared memory segment|failed to extend /dev/shm|posix_fallocate failed"
        r"|/dev/shm.*(?:No space left|Cannot allocate memory)|insufficient shared memory"
        r"|shm\w*.*Cannot allocate memory|unable to (?:mmap|open) shared memory"
        r"|DataLoader worker .* killed by signal: Bus error",
        "A segment in /dev/shm could not be created: it is full or too small (containers have "
        "64 MiB by default), or stale segments fill it.",
        "Enlarge it (--shm-size, emptyDir with medium Memory), and remove stale "
        "/dev/shm/nccl-* files.",
    ),
    _rule(
        "disk-full",
        Role.CAUSE,
        r"\[Errno (?:28|122)\]|No space left on device|Disk quota exceeded",
        "A file could not be written: the disk is full or the quota is used up.",
        "Free space, or write elsewhere.",
    ),
    _rule(
        "gpu-memory",
        Role.CAUSE,
        r"(?:CUDA|HIP|GPU|XPU) out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED"
        r"|(?:Cuda|CUDA|HIP) failure .{0,60}'out of memory'|Failed to CUDA (?:c|m)alloc"
        r"|(?:cuda|hip)Malloc\w*.*(?:out of memory|Cannot allocate memory)"
        r"|cuMem(?:Create|Alloc)\w*.*(?:out of memory|CUDA_ERROR_OUT_OF_MEMORY)",
        "A rank ran out of GPU memory.",
        "Reduce the micro-batch, use activation checkpointing or more sharding, and look for "
        "other processes on the GPU.",
    ),
    _rule(
        "host-memory",
        Role.CAUSE,
        r"Cannot allocate memory|^MemoryError\b|std::bad_alloc"
        r"|DefaultCPUAllocator: (?:can't|not enough)",
        "Host memory could not be allocated.",
        "Ask for more host memory, or use less: data-loader workers, pinned buffers, offload.",
    ),
    _rule(
        "duplicate-gpu",
        Role.CAUSE,
        r"Duplicate GPU detected",
        "Two ranks use the same GPU.",
        "Give each rank its own: torch.cuda.set_device(LOCAL_RANK) before the first "
        "collective, and no more ranks per node than GPUs in CUDA_VISIBLE_DEVICES.",
    ),
    _rule(
        "version",
        Role.CAUSE,
        r"Mismatched NCCL version|version mismatch with remote",
        "Ranks run different versions of NCCL and cannot form a communicator.",
        "Use the same image, or the same torch and NCCL, on all nodes.",
    ),
    _rule(
        "mismatch",
        Role.CAUSE,
        r"[Cc]ollective mismatch|Mismatched collective|NCCL WARN .*[Mm]essage truncated"
        r"|receiv(?:ed|ing) \d+ bytes instead of|Detected mismatch between collectives",
        "NCCL itself saw ranks issue different collectives or sizes, or differ in settings.",
        "Compare the calls of the ranks (NCCL_DEBUG_SUBSYS=COLL, or TORCH_DISTRIBUTED_DEBUG="
        "DETAIL), and the NCCL_ variables of the nodes.",
    ),
    _rule(
        "no-algorithm",
        Role.CAUSE,
        r"[Nn]o algorithm/protocol",
        "NCCL has no algorithm and protocol for a call: NCCL_ALGO or NCCL_PROTO excludes all "
        "that the function has.",
        "Remove NCCL_ALGO and NCCL_PROTO.",
    ),
    _rule(
        "nvls",
        Role.CAUSE,
        r"NVLink SHARP \(NVLS\)|bind NVLS|NVLS.*[Mm]ulticast.*(?:fail|error)"
        r"|nvls\.cc:\d+ NCCL WARN .*(?:[Ff]ail|rror)",
        "NVLink multicast memory could not be set up: the Fabric Manager or an NVSwitch is in "
        "a bad state. NCCL_NVLS_ENABLE=0 avoids it.",
        "Restart the Fabric Manager or reset the node; NCCL_NVLS_ENABLE=0 until then.",
    ),
    _rule(
        "fabric-manager",
        Role.CAUSE,
        r"system not yet initialized|(?i:cuda|hip|driver).{0,40}(?:failure|error)[ :=]+802\b",
        "The GPUs are not initialized (CUDA error 802): the Fabric Manager does not run or has "
        "another version than the driver.",
        "Start nvidia-fabricmanager in the driver's version.",
    ),
    _rule(
        "p2p",
        Role.CAUSE,
        r"P2P is disabled between NVLINK",
        "Two GPUs joined by NVLink refuse peer access: likely a hardware fault.",
        "Look at nvidia-smi nvlink -s and at dmesg.",
    ),
    _rule(
        "peer-access",
        Role.CAUSE,
        r"peer access is not supported|to open CUDA IPC handle|IpcOpenMemHandle|IpcGetMemHandle"
        r"|ncclP2pImportShareableBuffer|cuMemImportFromShareableHandle"
        r"|p2p\.cc:\d+ NCCL WARN (?:Cuda|HIP) failure",
        "A rank cannot map the GPU memory of another one (CUDA or HIP IPC).",
        "Give ranks of a host the same visible devices and IPC namespace, and check the "
        "driver; NCCL_P2P_DISABLE=1 confirms.",
    ),
    _rule(
        "no-interface",
        Role.CAUSE,
        r"no socket interface found|No usable listening interface|No IP interface found"
        r"|is neither AF_INET\(?2?\)? nor AF_INET6",
        "No network interface fits NCCL_SOCKET_IFNAME.",
        "Set NCCL_SOCKET_IFNAME to an interface that `ip addr` lists on this host, or unset "
        "it.",
    ),
    _rule(
        "driver",
        Role.CAUSE,
        r"driver version is insufficient|not supported in the installed CUDA driver"
        r"|no kernel image is available|forward compatibility was attempted",
        "The driver or the GPU does not fit the CUDA version of the libraries.",
        "Update the driver, or use a build for it.",
    ),
    _rule(
        "no-gpu",
        Role.CAUSE,
        r"no (?:CUDA|ROCm)-capable device|No (?:CUDA|HIP) GPUs are available"
        r"|invalid device ordinal|Invalid rank requested",
        "A rank found no GPU, or asked for one that is not visible.",
        "Compare ranks per node with CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES).",
    ),
    _rule(
        "imex",
        Role.CAUSE,
        # NCCL's mnnvl.cc.
        r"MNNVL .*not (?:working|supported)|nvidia-caps-imex-channels|IMEX (?:channel|daemon).*"
        r"(?:fail|not|rror)",
        "NVLink between hosts (MNNVL) is there and cannot be used: the process has no IMEX "
        "channel, or the IMEX daemon of a host does not run.",
        "Give the container /dev/nvidia-caps-imex-channels and start nvidia-imex on all hosts; "
        "NCCL_MNNVL_ENABLE=0 confirms.",
    ),
    _rule(
        "topology-file",
        Role.CAUSE,
        # NCCL's graph/xml.h and xml.cc.
        r"Attribute \S+ of node \S+ not found|XML (?:parse|[Ii]mport|Topology).*"
        r"(?:rror|nexpected|nvalid|xceed)|Could not open XML (?:topology )?file",
        "NCCL's topology file does not fit this version or this machine:",
        "Unset NCCL_TOPO_FILE, or use the file of this machine, driver and NCCL version.",
    ),
    _rule(
        "device-missing",
        Role.CAUSE,
        r"/dev/(?:infiniband|nvidia(?!-caps)|dri|kfd)\S*.*(?:No such (?:file|device)"
        r"|not found|Permission denied|Operation not permitted)"
        r"|failed to open /dev/(?:infiniband|nvidia)",
        "A device file is missing in the container, or may not be opened:",
        "Give the container the devices (--device /dev/infiniband, --gpus all, the device "
        "plugin of Kubernetes) and the rights to open them.",
    ),
    _rule(
        "ib-connect",
        Role.CAUSE,
        r"ibv_modify_qp",
        "Two adapters could not be connected: they do not reach each other (wrong GID index, "
        "VLAN or rail), or the port is down.",
        "Test the pair with ib_write_bw; check NCCL_IB_GID_INDEX, NCCL_IB_HCA, NCCL_CROSS_NIC.",
    ),
    _rule(
        "ib-event",
        Role.CAUSE,
        r"[Gg]ot async event|async fatal event",
        "An InfiniBand adapter reported an event: its port, link or queue failed.",
        "Look at the link and cable of the adapter (ibstat, dmesg, error counters).",
    ),
    _rule(
        "plugin",
        Role.CAUSE,
        r"(?:NCCL WARN|WARN:.*) NET/OFI .*(?:[Ff]ail|[Cc]ouldn't|[Uu]nable|rror"
        r"|No eligible providers)"
        r"|WARN.*[Ff]ailed to initialize (?:any )?NET",
        "The network plugin failed to start.",
        "Check that the fabric's devices are in the container and that plugin, libfabric and "
        "NCCL fit together.",
    ),
    _rule(
        "assert",
        Role.CAUSE,
        r"device-side assert|Assertion [`'].*['`] failed|HSA_STATUS_ERROR_EXCEPTION",
        "A kernel of the job failed an assertion, often an index out of bounds.",
        "Run again with CUDA_LAUNCH_BLOCKING=1 to see the operator that fails.",
    ),
    _rule(
        "assertion",
        Role.CAUSE,
        # MPICH's own form, and assert() of C.
        r"Assertion failed in file|: Assertion `.{1,200}' failed|^Assertion failed: ",
        "An assertion of the program or of a library failed.",
        "Look at the source line that it names.",
    ),
    _rule(
        "illegal-access",
        Role.CAUSE,
        r"illegal memory access|illegal instruction was|misaligned address|hipErrorIllegal"
        r"|Memory access fault by GPU",
        "A kernel of the job read or wrote memory that is not its own.",
        "Run again with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer to see which.",
    ),
    _rule(
        "rendezvous",
        Role.VAGUE,
        r"client socket has (?:timed out|failed)|DistNetworkError|RendezvousConnectionError"
        r"|RendezvousTimeoutError",
        "The ranks did not find each other at the rendezvous (MASTER_ADDR and MASTER_PORT).",
        "Check that the first node runs, and that its address and port are reachable and free.",
    ),
    _rule(
        "rendezvous",
        Role.VAGUE,
        r"EADDRINUSE|[Aa]ddress already in use",
        "A port is in use already, by an earlier job or another service.",
        "End the earlier job, or choose another port (MASTER_PORT, if it is the rendezvous').",
    ),
    # Errors that do not say their cause.
    _rule(
        "ib-retry",
        Role.VAGUE,
        r"Got completion .*(?:status=12\b|error 12\b|\(12\))",
        "InfiniBand gave up after retries (status 12): the other end died, a link flaps, or "
        "NCCL_IB_TIMEOUT is too short.",
        "Look for an earlier failure of the peer, then at the links between the two hosts.",
    ),
    _rule(
        "ib",
        Role.VAGUE,
        r"Got completion .*(?:status|error)",
        "An InfiniBand operation failed; the status in the line says how.",
        "Look for an earlier failure of the peer, then at the two adapters.",
    ),
    _rule(
        "connect",
        Role.VAGUE,
        _NO_WEB
        + r"(?:(?:NCCL WARN|[Ss]ocket|gloo|UCX|[Cc]onnect(?:FullMesh|\(\)| to \S*[:<]\d)"
        r"|[Ee]rrno|Error\b).*(?:refused|timed out|[Nn]o route|unreachable|connection abort)"
        r"|[Cc]onnect\w* .*SO_ERROR)",
        "A host could not be reached over TCP.",
        "Check the firewall and the interface (NCCL_SOCKET_IFNAME) between the two hosts.",
    ),
    _rule(
        "cuda",
        Role.VAGUE,
        r"Cuda failure|HIP failure|(?:CUDA|HIP|Triton) [Ee]rror|CUDNN_STATUS_|CUBLAS_STATUS_"
        r"|Test CUDA failure|ncclUnhandledCudaError|unspecified launch failure",
        "A call of the GPU's runtime failed.",
        "Look at the kernel's log (dmesg, Xid), and run again with CUDA_LAUNCH_BLOCKING=1.",
    ),
    _rule(
        "nccl",
        Role.VAGUE,
        r"NCCL error(?: in|:)|NCCL Error \d|Test NCCL failure|ncclSystemError|ncclInternalError"
        r"|ncclInvalidUsage|unhandled system error|encountered a fatal error",
        "A call of NCCL failed.",
        "Look for the WARN line before it; without one, run again with NCCL_DEBUG=INFO.",
    ),
    _rule(
        "mpi",
        Role.VAGUE,
        r"MPI_ERRORS_ARE_FATAL|MPI_ERRORS_ABORT|^Fatal error in (?:P?MPI|internal_)\w+:",
        "MPI ended the job after an error of one of its calls.",
        "Look at the lines before it: they name the call and the process.",
    ),
    _rule(
        "launcher",
        Role.ENDED,
        # Open MPI, MPICH's and Intel MPI's Hydra, srun, kubectl, Slurm's and LSF's reports.
        r"BAD TERMINATION OF ONE|Primary job +terminated normally, but|MPI_ABORT was invoked"
        r"|(?:mpirun|prterun|mpiexec|Hydra) detected that one or more processes exited"
        r"|(?:mpirun|prterun|mpiexec) was unable to|not enough slots available"
        r"|Job step aborted:|srun: error: (?:Unable to|task \d+ launch failed)"
        r"|slurmstepd: error: execve|Force Terminated|forcing job termination|STEPD TERMINATED"
        r"|BackoffLimitExceeded|reached the specified backoff limit"
        r"|daemon (?:has )?unexpectedly failed"
        r"|^\s*Reason: +(?:Error|ContainerCannotRun|StartError)\s*$|^Status: +Failed\b"
        r"|^\S+ +\d+/\d+ +(?:Error|CrashLoopBackOff|RunContainerError|ImagePullBackOff) +\d"
        r"|Back-off restarting failed container|JobState=FAILED|^State: FAILED"
        r"|^\d{1,12}(?:_\d{1,9})?[ |]+\S.*\b(?:FAILED|TIMEOUT|CANCELLED|NODE_FAIL|PREEMPTED"
        r"|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE)\b\+?[ |]+\d+:\d+",
        "The launcher or the scheduler reports that the job failed.",
        "Look for the first traceback, signal or error of a rank.",
    ),
    # Waits.
    _rule(
        "store-wait",
        Role.WAIT,
        r"store->get.*[Tt]imeout|Timeout waiting for key|DistStoreError|wait timeout after"
        r"|Timed out waiting \d+ms for",
        "A rank waited in vain for another one to register: that one did not start, is "
        "late, or waits elsewhere.",
        "Look at what the rank named in the line did; all ranks must create groups in one "
        "order.",
    ),
    _rule(
        "test-timeout",
        Role.WAIT,
        r"Test timeout \(\d+s\)",
        "nccl-tests waited in vain for a collective to end, until its own time limit (-T).",
        "Look for a rank that failed or is missing, then at the network between the ranks.",
    ),
    _rule(
        "timeout-elsewhere",
        Role.WAIT,
        r"dump signal due to a collective timeout from\s+(?:this local rank|rank \d+)",
        "A collective timed out on another rank, which asked for the flight-recorder dumps.",
        "Read the output of the rank that the line names.",
    ),
    _rule(
        "heartbeat",
        Role.WAIT,
        r"watchdog got stuck for|Heartbeat monitor timed out|detected no heartbeat",
        "The watchdog thread of a rank hung in a call of CUDA or NCCL, and its process was "
        "ended.",
        "Find what blocks: a rank that left, or the GIL held in a CUDA call (py-spy dump).",
    ),
)


def classify(line: str) -> FailureRule | None:
    """Return the first rule that knows the line."""
    return next((rule for rule in FAILURES if rule.pattern.search(line)), None)


# SIGUSR1 and SIGUSR2: schedulers send them before a limit.
_ANNOUNCED = (
    "failure-signal",
    Role.ENDED,
    "ended on a signal by which schedulers announce a limit (SIGUSR1 or SIGUSR2)",
    "Look at the time limit of the job.",
)
SIGNALS: dict[int, tuple[str, Role, str, str]] = {
    9: (
        "failure-killed",
        Role.SIGNAL,
        "was killed (SIGKILL)",
        "See who sent it: the kernel for want of memory (dmesg), the scheduler, or a person.",
    ),
    11: (
        "failure-segfault",
        Role.SIGNAL,
        "crashed (SIGSEGV)",
        "Run again with PYTHONFAULTHANDLER=1, or open the core dump.",
    ),
    7: (
        "failure-bus",
        Role.SIGNAL,
        "crashed (SIGBUS)",
        "Usual with a full /dev/shm, or a file that shrank while it was mapped.",
    ),
    6: (
        "failure-abort",
        Role.VAGUE,
        "aborted (SIGABRT)",
        "The line before says why: an uncaught C++ exception or a watchdog.",
    ),
    15: (
        "failure-stopped",
        Role.CONSEQUENCE,
        "was told to stop (SIGTERM)",
        "Look at the first failure of the job.",
    ),
    10: _ANNOUNCED,
    12: _ANNOUNCED,
    2: (
        "failure-terminated",
        Role.ENDED,
        "was interrupted (SIGINT)",
        "Somebody stopped the job.",
    ),
}


def signal_of(exit_code: int) -> int | None:
    """Return the signal that a process ended with: -9 of Python, 137 of a shell."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    return number if 0 < number < 65 else None
