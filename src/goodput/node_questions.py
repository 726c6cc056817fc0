"""What the operations commands ask a node, as shell: one batch, no Python start, nothing written.

Everything is found from what runs: a unit's main process, its arguments and environment in /proc, and the HTTP
interfaces that these name. ``\\x1e`` separates answers, ``\\x1f`` the words of a command line.
"""

from __future__ import annotations

import shlex
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ansible_collections.goodput.spark.plugins.module_utils.k3s_node import KUBECTL_CACHE
from ansible_collections.goodput.spark.plugins.module_utils.rdma_counters import LOSS_COUNTERS, SOURCES
from ansible_collections.goodput.spark.plugins.module_utils.serving import Answer, Sample, samples

LMCACHE, COORDINATOR = "goodput-lmcache", "goodput-coordinator"
WORKER, FRONTEND = "goodput-worker", "goodput-frontend"
L2_MOUNT = "/srv/goodput/l2"
UNIT_PROPERTIES = (
    "Id", "Type", "RemainAfterExit", "LoadState", "ActiveState", "SubState", "UnitFileState", "MainPID", "NRestarts",
    "Result", "ActiveEnterTimestampMonotonic",
)  # fmt: skip
_PORT = "*/ports/1"
_COUNTERS = [f"{_PORT}/{path}" for source in SOURCES for path in (source.sent, source.received)]
_LOSSES = [f"{_PORT}/hw_counters/{name}" for name in LOSS_COUNTERS]

# main UNIT: its process, "" if it does not run. flag PID NAME: the value of an argument. ask URL...: bodies, each
# followed by the separator, the HTTP status (000: no answer), the address, the separator. Comments of metrics and the
# many lines of histograms stay on the node. of UNIT: the answers that follow are this unit's.
FUNCTIONS = r"""
main() { p=$(systemctl show -P MainPID "$1"); [ "${p:-0}" = 0 ] || echo "$p"; }
words() { tr '\0' '\n' < "/proc/$1/cmdline"; }
flag() { words "$1" | sed -n -e "/^$2\$/{n;p;q;}" -e "s/^$2=//p"; }
variable() { tr '\0' '\n' < "/proc/$1/environ" | sed -n "s/^$2=//p"; }
here() { case "${1:-0.0.0.0}" in 0.0.0.0|::) echo 127.0.0.1;; *) echo "$1";; esac; }
rs=$(printf '\036')
ask() { curl -sS -m 15 --fail-early --noproxy '*' -w "\n$rs%{http_code} %{url_effective}$rs\n" "$@" |
  grep -v -e '^#' -e '^[a-zA-Z_:]*_bucket{'; }
frontend() { p=$(main goodput-frontend); [ -n "$p" ] || return 0; h=$(flag $p --http-host); q=$(flag $p --http-port)
  echo "http://$(here $h):${q:-8000}"; }
of() { printf '\035%s\035' "$1"; }
"""

HOST = "cat /proc/uptime /proc/loadavg; grep -E '^(MemTotal|MemAvailable|SwapTotal|SwapFree):' /proc/meminfo"
MEMORY_AT_REST = "cat /var/lib/goodput/memory-at-rest.json"
UNITS = f"systemctl show 'goodput-*' --property={','.join(UNIT_PROPERTIES)}"
# A path a line: grep leaves out what is missing or refuses to be read, such as the carrier of a link that is down.
RDMA = (
    f"cd /sys/class/infiniband 2>/dev/null || exit 0; ls -d */device/net/* 2>/dev/null; grep -s -H . */parent "
    f"{_PORT}/state {_PORT}/gid_attrs/ndevs/0 {' '.join(_COUNTERS + _LOSSES)}; true"
)
NET = "cd /sys/class/net && grep -s -H . */operstate */carrier */speed */mtu; true"
ADDRESSES = "ip -o -4 address show"
RAIL_PLAN = "cat /etc/netplan/90-goodput-rails.yaml"
# One record a process: unit, pid, resident kB, words.
PROCESSES = r"""
for f in /sys/fs/cgroup/*/goodput-*.service/cgroup.procs; do
  [ -r "$f" ] || continue
  u=${f%.service/cgroup.procs}; u=${u##*/}
  while read p; do
    r=$(sed -n 's/^VmRSS:[^0-9]*\([0-9]*\) kB/\1/p' "/proc/$p/status")
    printf '%s\037%s\037%s\037' "$u" "$p" "$r"; tr '\0' '\037' < "/proc/$p/cmdline"; printf '\036\n'
  done < "$f"
done 2>/dev/null
true
"""
HTTP = (
    FUNCTIONS
    + r"""
p=$(main goodput-lmcache)
if [ -n "$p" ]; then
  q=$(flag $p --http-port); u="http://$(here $(flag $p --http-host)):${q:-8080}"
  of goodput-lmcache; ask "$u/healthcheck" "$u/config" "$u/status" "$u/metrics"
fi
p=$(main goodput-worker)
if [ -n "$p" ]; then
  q=$(variable $p DYN_SYSTEM_PORT)
  u="http://$(here $(variable $p DYN_SYSTEM_HOST)):$q"
  [ -z "$q" ] || { of goodput-worker; ask "$u/health" "$u/metrics"; }
fi
u=$(frontend)
[ -z "$u" ] || { of goodput-frontend; ask "$u/health" "$u/v1/models" "$u/metrics"; }
true
"""
)
# A hung disk must not hang the screen.
L2 = (
    FUNCTIONS
    + rf"""
p=$(main goodput-lmcache)
b=$([ -z "$p" ] || words "$p" | sed -n 's/.*"base_path": *"\([^"]*\)".*/\1/p')
for d in ${{b:-{L2_MOUNT}}}; do
  [ -d "$d" ] || continue
  printf '%s\037' "$d"; timeout 20 df -B1 --output=target,size,avail "$d" | tail -n 1 | tr '\n' '\037'
  timeout 20 du -s -B1 "$d" | cut -f1 | tr '\n' '\037'; timeout 20 find "$d" -name '*.data' -printf x | wc -c
done
true
"""
)
# Only the server has the admin's kubeconfig. What kubectl keeps of the API goes where a reset takes it away.
ON_SERVER = f"""
[ -r /etc/rancher/k3s/k3s.yaml ] && [ -x /usr/local/bin/k3s ] || exit 0
export KUBECACHEDIR={KUBECTL_CACHE}
"""
# Lists of objects, each followed by the separator.
KUBE = (
    ON_SERVER
    + r"""
timeout 40 /usr/local/bin/k3s kubectl get nodes,pods --all-namespaces -o json; printf '\036'
timeout 20 /usr/local/bin/k3s kubectl get dynamographdeployments.nvidia.com --all-namespaces -o json 2>/dev/null
printf '\036'
"""
)
# The endpoint's port is the same on every node.
KUBE_HTTP = (
    FUNCTIONS
    + ON_SERVER
    + r"""
h=$(sed -n 's/^node-ip: *//p' /etc/rancher/k3s/config.yaml | tr -d "'\"")
set -- $(timeout 20 /usr/local/bin/k3s kubectl get services --all-namespaces -l app.kubernetes.io/part-of=goodput \
  -o 'jsonpath={.items[*].spec.ports[*].nodePort}')
[ -z "$1" ] || { u="http://$h:$1"; of goodput-frontend; ask "$u/health" "$u/v1/models" "$u/metrics"; }
true
"""
)
STATUS = {
    "host": HOST,
    "at_rest": MEMORY_AT_REST,
    "units": UNITS,
    "rdma": RDMA,
    "net": NET,
    "addresses": ADDRESSES,
    "rail_plan": RAIL_PLAN,
    "processes": PROCESSES,
    "http": HTTP,
    "l2": L2,
    "kube": KUBE,
    "kube_http": KUBE_HTTP,
}
# Where a client on the first node finds the endpoint; its answers belong to its address instead of a unit.
ENDPOINT = FUNCTIONS + 'u=$(frontend); [ -z "$u" ] || { of "$u"; ask "$u/health" "$u/v1/models" "$u/metrics"; }; true\n'


@dataclass(frozen=True)
class Process:
    """One process of a unit (its name without ``.service``)."""

    unit: str
    pid: int
    rss_bytes: int
    words: tuple[str, ...]


def processes(text: str) -> list[Process]:
    """The answer to PROCESSES. A process that ended meanwhile has no words or no memory and is left out."""
    found = []
    for record in text.split("\x1e"):
        unit, _, rest = record.strip("\n").partition("\x1f")
        pid, _, rest = rest.partition("\x1f")
        rss, _, line = rest.partition("\x1f")
        words = tuple(line.split("\x1f")[:-1])
        if pid.isdigit() and rss.isdigit() and words:
            found.append(Process(unit, int(pid), int(rss) * 1024, words))
    return found


def answers(text: str) -> dict[str, dict[str, Answer]]:
    """The answer to HTTP: ``{unit: {"/metrics": Answer}}``; status 0 where none came."""
    parts = text.split("\x1d")[1:]
    return {
        unit: {urllib.parse.urlsplit(url).path: answer for url, answer in replies(body)}
        for unit, body in zip(parts[::2], parts[1::2], strict=False)
    }


def counters(answers: Mapping[str, Answer]) -> list[Sample]:
    """The samples of /metrics; none unless it answered."""
    answer = answers.get("/metrics")
    return samples(answer.text) if answer is not None and answer.status == 200 else []


def replies(text: str) -> Iterator[tuple[str, Answer]]:
    """(address, answer) for each address that ``ask`` was given."""
    parts = text.split("\x1e")
    for body, end in zip(parts[::2], parts[1::2], strict=False):
        status, _, url = end.partition(" ")
        code = int(status) if status.isdigit() else 0
        yield url.strip(), Answer(code, body.strip("\n") if code else f"no answer from {url.strip()}")


def post(url: str, body: str) -> str:
    """A POST whose answer is streamed; the separator and the HTTP status stand on the last line.

    The body comes by a pipe, so that its length has no limit. The shell is ended with status 0 whatever curl met: the
    status line tells.
    """
    return (
        f"printf %s {shlex.quote(body)} | curl -sS -N -m 3600 --noproxy '*' -H 'Content-Type: application/json' "
        f"-w '\\n\x1e%{{http_code}}\\n' --data-binary @- {shlex.quote(url)} 2>&1"
    )
