#!/bin/bash
# Train on a machine that may be taken away:
#
#     examples/spot.sh --watch aws deepspeed dsimg/train.py --data DIR --out runs/days
#
# Runs the command with --stop_file, and starts it again as long as that helps: it goes on where it stopped. With
# --watch aws or --watch gcp the cloud's own notice (two minutes ahead, or half a minute) is asked for every five
# seconds. On the notice, or when this script gets TERM or INT, or when you make the stop file, the training saves and
# leaves, and this script ends with its exit code 75: give the same command on the next machine, with the same run folder.
#
# Exit codes: 0 done; 2 an error for you to mend; 75 stopped, to be started again; else what the command failed with.
set -u

QUICK=600             # seconds: a start that fails within them has failed quickly
QUICK_FAILURES=3      # so many in a row, and it is given up
PAUSE=10              # seconds between a failure and the next start
STOP_FILE=${STOP_FILE:-${TMPDIR:-/tmp}/dsimg-$$.stop}

cloud=''
if [ "${1:-}" = --watch ]; then
    cloud=${2:-}
    shift 2 || set --
fi
case $cloud in '' | aws | gcp) ;; *) set -- ;; esac
if [ $# -eq 0 ]; then
    echo "usage: $0 [--watch aws|gcp] COMMAND ...   (a command that ends with flags of dsimg train)" >&2
    exit 2
fi

# Ask the machine's own metadata address, which no packet leaves the machine for.
metadata() {
    curl --silent --fail --noproxy '*' --max-time 2 "$@"
}

notice() {
    case $cloud in
        aws)
            token=$(metadata -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' http://169.254.169.254/latest/api/token) &&
                metadata -H "X-aws-ec2-metadata-token: $token" http://169.254.169.254/latest/meta-data/spot/instance-action ;;
        gcp)
            metadata -H 'Metadata-Flavor: Google' http://169.254.169.254/computeMetadata/v1/instance/preempted | grep TRUE ;;
    esac
}

watch_cloud() {
    until found=$(notice); do sleep 5; done
    echo "the cloud takes this machine away: $found"
    touch "$STOP_FILE"
}

watching=''
# shellcheck disable=SC2329  # called by the trap
leave() {
    [ -z "$watching" ] || kill "$watching" 2>/dev/null
    rm -f "$STOP_FILE"
}
interrupted=''
rm -f "$STOP_FILE"
trap leave EXIT
trap 'interrupted=1; touch "$STOP_FILE"' TERM INT
echo "stop file: $STOP_FILE"
if [ -n "$cloud" ]; then
    watch_cloud &
    watching=$!
fi

failures=0
while [ ! -e "$STOP_FILE" ]; do
    SECONDS=0
    "$@" --stop_file "$STOP_FILE" &
    running=$!
    # A signal ends `wait` early; then it is called again.
    while :; do
        interrupted=''
        wait "$running"
        code=$?
        [ -n "$interrupted" ] || break
    done
    echo "exit code $code"
    case $code in
        0 | 2) exit "$code" ;;
        75) failures=0 ;;
        *)
            failures=$((SECONDS < QUICK ? failures + 1 : 1))
            if [ "$failures" -ge "$QUICK_FAILURES" ]; then
                echo "failed quickly $failures times in a row: giving up"
                exit "$code"
            fi
            [ -e "$STOP_FILE" ] || sleep "$PAUSE" ;;
    esac
done
exit 75
