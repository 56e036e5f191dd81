#!/usr/bin/env bash
# A real Slurm on this machine, for tests/slurm: munge, slurmctld, and two nodes of eight pretend GPUs each.
# As root. Installs what is missing, and starts it anew each time, so that every call ends in the same state.
# All its files lie in /run/draftmill-slurm, so a Slurm that this machine may have already is left alone; its
# commands talk to this one where SLURM_CONF=/run/draftmill-slurm/slurm.conf.
#
# A node is a slurmd in namespaces of its own for host name, processes and mounts: what runs there sees another
# host with other pids and this Slurm's files in /etc/slurm, where srun looks for them in a job; and killing
# the namespace's first process is a power cut.
#
#   setup.sh        install and start all
#   setup.sh stop   end all of it
#   setup.sh node N start node N (1 or 2) again after such a power cut
set -euo pipefail
cd "$(dirname "$0")"

NODES=(1 2)
STATE=/run/draftmill-slurm
export SLURM_CONF=$STATE/slurm.conf

main() {
    case "${1:-}" in
    stop) stop ;;
    node) start_node "$2" ;;
    *)
        install_packages
        stop
        configure
        start
        ;;
    esac
}

install_packages() {
    if ! { command -v munged && command -v slurmctld && command -v slurmd && command -v sbatch; } > /dev/null; then
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            slurmctld slurmd slurm-client munge > /dev/null
    fi
}

stop() {
    local file pid
    for file in "$STATE"/*.pid; do
        [ -e "$file" ] || continue
        pid=$(< "$file")
        kill -KILL "$pid" 2> /dev/null || true
        while kill -0 "$pid" 2> /dev/null; do sleep 0.05; done
    done
    rm -rf "$STATE"
}

configure() {
    local n
    mkdir -p "$STATE"/{spool,log,munge} /etc/slurm
    mungekey --create --keyfile="$STATE/munge/key"
    chown -R munge: "$STATE/munge"
    for n in 0 1 2 3 4 5 6 7; do
        [ -e "/dev/fakegpu$n" ] || mknod "/dev/fakegpu$n" c 1 3
    done
    sed -e "s/@HOST@/$(hostname -s)/" -e "s:@STATE@:$STATE:" slurm.conf > "$SLURM_CONF"
    cp gres.conf "$STATE"
}

start() {
    local n
    runuser -u munge -- munged --force --key-file="$STATE/munge/key" --socket="$STATE/munge/socket" \
        --pid-file="$STATE/munge/munged.pid" --log-file="$STATE/munge/munged.log" --seed-file="$STATE/munge/seed"
    cp "$STATE/munge/munged.pid" "$STATE/munged.pid"
    slurmctld -c
    timeout 60 bash -c 'until scontrol ping > /dev/null 2>&1; do sleep 0.2; done'
    for n in "${NODES[@]}"; do start_node "$n"; done
    echo "Slurm $(slurmctld -V | cut -d' ' -f2) is up: $(sinfo --noheader --format='%D nodes %T, %G each')"
}

# the first process of a node's namespaces; its end takes every process of the node with it
start_node() {
    local name="mill$1" tries
    unshare --uts --pid --fork --kill-child --mount-proc \
        bash -c 'hostname "$1"; mount --bind "$2" /etc/slurm; slurmd -D -N "$1" & wait' _ "$name" "$STATE" \
        < /dev/null > "$STATE/log/$name.out" 2>&1 &
    disown
    echo $! > "$STATE/$name.pid"
    for tries in {1..300}; do
        if sinfo --noheader --nodes="$name" --format=%T | grep -qE '^(idle|mixed|allocated)$'; then return; fi
        scontrol update nodename="$name" state=resume 2> /dev/null || true
        sleep 0.2
    done
    echo "setup.sh: node $name does not come up after $tries tries:" >&2
    tail "$STATE/log/$name.log" "$STATE/log/$name.out" >&2
    exit 1
}

main "$@"
