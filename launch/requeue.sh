# Sourced by the SLURM scripts: does a job that has ended go back into its queue, and without which hosts?
#
#   before=$(newest_checkpoint "$folder")
#   ... the run ...
#   requeue_if_useful "$folder" "$code" "$before"     returns 1 when the job has ended for good

newest_checkpoint() { # FOLDER
    find "$1/checkpoints" -path '*/step_*/COMPLETE.json' 2>/dev/null | sort | tail -n 1
}

# What this attempt wrote into STATUS.json; nothing where it died before it wrote any: then the file is that of the
# attempt before. The time is kept where requeue.sh is sourced, before the run.
attempt_began_s=$(date +%s)
status_of_attempt() { # FOLDER
    local written_s
    written_s=$(stat -c %Y "$1/STATUS.json" 2>/dev/null || stat -f %m "$1/STATUS.json" 2>/dev/null) || return 0
    [[ $written_s -lt $attempt_began_s ]] || cat "$1/STATUS.json"
}

# A run that stopped early saved first, so it always goes on. One that lost a rank (killed, its host down, a link that
# hangs) goes on if it got further than where this attempt began: a fault that comes back at once ends for good.
is_worth_a_restart() { # FOLDER CODE BEFORE
    [[ $2 -ne 0 && $2 -ne 2 ]] || return 1
    [[ $2 -eq 75 ]] || status_of_attempt "$1" | grep -q '"state": "preempted"' && return 0
    [[ $(newest_checkpoint "$1") != "$3" ]] || return 1
    [[ $2 -gt 128 ]] || status_of_attempt "$1" | grep -qE 'ended without a message|no heartbeat|did not answer|store is gone'
}

# A host on which a rank was lost twice is left out from now on.
exclude_bad_hosts() { # FOLDER
    local host bad
    host=$(sed -nE 's/.*rank [0-9]+ on ([^:, ]+).*(ended without a message|no heartbeat).*/\1/p' <(status_of_attempt "$1"))
    [[ -n $host ]] || return 0
    echo "$host" >>"$1/logs/lost_hosts"
    bad=$(sort "$1/logs/lost_hosts" | uniq -c | awk '$1 >= 2 {print $2}' | paste -sd,)
    [[ -z $bad ]] || scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=$bad"
}

requeue_if_useful() { # FOLDER CODE BEFORE
    local restarts=${SLURM_RESTART_COUNT:-0}
    [[ $restarts -lt ${MAX_RESTARTS:-100} ]] && is_worth_a_restart "$@" || return 1
    echo "ended with code $2 (restart $restarts): requeued, continues in the same folder"
    exclude_bad_hosts "$1"
    trap - TERM USR1
    scontrol requeue "$SLURM_JOB_ID" && exec sleep "${REQUEUE_WAIT_S:-300}" # SLURM kills it; exiting first would mark the job as FAILED
}
