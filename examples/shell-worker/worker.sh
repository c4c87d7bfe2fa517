#!/bin/sh
# A worker for tasks in sh and curl:  worker.sh JOBS [QUEUE]
#
# JOBS is a directory of programs, one for each name of a task; tasks of other names are left to others. A
# program gets the task on stdin, as JSON,
# and prints its result, as JSON. It ends with 0 when it is done, with 65 when no second try could help,
# with anything else when one might. What it says on stderr is kept with a task that fails, and shows that
# it goes on: one that says nothing for the task's execution window is taken for hung, and loses its lease.
#
# HOLDFAST_URL    where the server is (http://127.0.0.1:8787)
# HOLDFAST_TOKEN  its token, if it has one
# WORKER          the name of this worker
#
# TERM and INT end it after the job at hand. A lease that is lost ends the job: whoever has it now does it.
set -u
umask 077
jobs=${1:?usage: worker.sh JOBS [QUEUE]}
queue=${2:-shell}
url=${HOLDFAST_URL:-http://127.0.0.1:8787}
worker=${WORKER:-sh-$$}

scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
# Not on the command line, where others could read it.
: >"$scratch/curl"
[ -z "${HOLDFAST_TOKEN:-}" ] || printf 'header = "Authorization: Bearer %s"\n' "$HOLDFAST_TOKEN" >"$scratch/curl"

stopping= asking=
trap 'stopping=1; [ -z "$asking" ] || kill $asking 2>/dev/null' TERM INT

# post WHAT FILE: the body is in the file. Always in a subshell, which becomes curl.
post() {
    exec curl --config "$scratch/curl" --silent --show-error --max-time 60 \
        --header 'Content-Type: application/json' --data-binary @"$2" \
        --output "$2.answer" --write-out '%{http_code}' "$url/v1/tasks/$1"
}

# report WHAT: what is in the file, until somebody has taken it: the same report twice is answered the same.
# Fails when it is not understood.
report() {
    tries=0
    while [ $tries -lt 30 ]; do
        case $(post "$1" "$scratch/report") in
        2??)
            echo "$name $lease $(sed 's/.*"answer":"\([A-Z]*\)".*/\1/' "$scratch/report.answer")"
            return 0
            ;;
        4??)
            cat "$scratch/report.answer" >&2
            return 1
            ;;
        esac
        tries=$((tries + 1))
        sleep 1
    done
    return 1
}

# fail REASON ERROR [END]
fail() {
    printf '{"worker":"%s","lease":"%s","reason":"%s","error":"%s","end":"%s"}' \
        "$worker" "$lease" "$1" "$2" "${3:-failed}" >"$scratch/report"
    report fail
}

# keep PID: say every third of the lease that the job goes on; when the lease is lost, end the job.
keep() {
    nap= said=0 beat=$scratch/beat-$lease
    trap 'kill $nap 2>/dev/null; exit' TERM
    while :; do
        sleep $((lease_s / 3 > 0 ? lease_s / 3 : 1)) &
        nap=$!
        wait $nap
        # A signal that comes before there is a trap for it is lost: so look, too.
        [ "$(cat "$scratch/current" 2>/dev/null)" = "$lease" ] || exit
        now=$(wc -c <"$scratch/errors")
        [ "$now" -gt "$said" ] && progressed=true || progressed=false
        said=$now
        printf '{"leases":[{"lease":"%s","progressed":%s}]}' "$lease" $progressed >"$beat"
        (post heartbeat "$beat") >/dev/null
        case $(cat "$beat.answer" 2>/dev/null) in
        *'"answer":"COMMITTED"'*) ;;
        *'"answer":"'*) kill "$1" 2>/dev/null && exit ;;
        esac
        rm -f "$beat" "$beat.answer"
    done
}

# text FILE: its end, as it may stand inside quotes in JSON.
text() {
    tail -c 2000 "$1" | tr '\n\t' '  ' | tr -d '\000-\037\177' | LC_ALL=C tr -d '\200-\377' |
        sed 's/\\/\\\\/g; s/"/\\"/g'
}

# names: of the programs, as a list in JSON.
names() {
    for job in "$jobs"/*; do
        [ -f "$job" ] && [ -x "$job" ] && printf '"%s"\n' "${job##*/}"
    done | grep -E '^"[A-Za-z0-9][A-Za-z0-9._-]*"$' | paste -s -d , -
}

if [ -z "$(names)" ]; then
    echo "$jobs: no programs there" >&2
    exit 2
fi
echo "ready $worker"
while [ -z "$stopping" ]; do
    printf '{"worker":"%s","queues":["%s"],"names":[%s],"wait_s":20}' "$worker" "$queue" "$(names)" >"$scratch/lease"
    : >"$scratch/status"
    post lease "$scratch/lease" >"$scratch/status" &
    asking=$!
    # A signal that came before there was a request to hang up.
    [ -z "$stopping" ] || kill $asking 2>/dev/null
    wait $asking
    if [ "$(cat "$scratch/status")" != 200 ]; then
        # Told to stop: hanging up gives back what is on its way. Else the server is away for a while.
        kill $asking 2>/dev/null
        asking=
        [ -n "$stopping" ] || sleep 1
        continue
    fi
    asking=
    leased=$scratch/lease.answer
    # An answer begins with the id, the lease and the name, and ends with the times: what stands in the
    # arguments between cannot be taken for them.
    begin='^{"tasks":\[{"id":"[^"]*","lease":"\([^"]*\)","name":"\([A-Za-z0-9][A-Za-z0-9._-]*\)",.*'
    lease=$(sed -n 's/^{"tasks":\[{"id":"[^"]*","lease":"\([^"]*\)".*/\1/p' "$leased")
    [ -n "$lease" ] || continue
    name=$(sed -n "s/$begin/\\2/p" "$leased")
    lease_s=$(sed -n 's/.*"lease_s":\([0-9]*\)[.0-9]*,"execution_window_s":[-+.0-9e]*,"expires_in_s":[-+.0-9e]*}\],"suspects":[a-z]*}$/\1/p' "$leased")
    lease_s=${lease_s:-60}
    sed 's/^{"tasks":\[//; s/\],"suspects":[a-z]*}$//' "$leased" >"$scratch/task"

    "$jobs/$name" <"$scratch/task" >"$scratch/result" 2>"$scratch/errors" &
    job=$!
    echo "$lease" >"$scratch/current"
    keep $job &
    keeper=$!
    wait $job
    code=$?
    while kill -0 $job 2>/dev/null; do # a signal ended the wait, not the job
        wait $job
        code=$?
    done
    : >"$scratch/current"
    kill $keeper 2>/dev/null
    case $code in
    0)
        printf '{"worker":"%s","lease":"%s","result":' "$worker" "$lease" >"$scratch/report"
        if [ -s "$scratch/result" ]; then cat "$scratch/result"; else printf null; fi >>"$scratch/report"
        printf '}' >>"$scratch/report"
        report complete || fail bad_result "what it printed is no JSON, or is too large" refused
        ;;
    65) fail refused "$(text "$scratch/errors")" refused ;;
    *) fail "exit_$code" "$(text "$scratch/errors")" ;;
    esac
done
