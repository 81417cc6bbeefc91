# shellcheck shell=bash
# Sourced by the batch scripts: a job's nodes and ports, one srun step a node, and how the job ends.

# Name of a node -> the address under which the other nodes reach it.
# Site: where nodes have a faster network of their own, print the name or address of that one instead.
address_of() {
  scontrol show node "$1" --oneliner | tr ' ' '\n' | sed -n 's/^NodeAddr=//p'
}

# First of a block of 64 free ports on this node. Site: with a firewall between nodes, print a fixed one.
free_ports() {
  python -m flexfloor.cli.node ports 64
}

# srun options of a step that takes whole nodes and shares them with the job's other steps.
step_options() {
  printf '%s\n' --overlap --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --mem=0 --kill-on-bad-exit=1
}

# start_step LOG NODE,NODE,... COMMAND...: one task on each of the nodes, in the background; sets step_pid.
# Steps of the server have one node each: a step ends on all its nodes when the job gives one of them back.
# What srun itself has to say goes to steps.log beside LOG.
start_step() {
  local log=$1 nodes=$2 options
  shift 2
  mapfile -t options < <(step_options)
  srun "${options[@]}" --nodes="$(tr ',' '\n' <<<"$nodes" | wc -l)" --nodelist="$nodes" --output="$log" "$@" \
    2>>"${log%/*}/steps.log" &
  step_pid=$!
}

# Whether the job still has the node: one that was given back ends its step.
has_node() {
  squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N | xargs -r scontrol show hostnames | grep -qx "$1"
}

# Ends (kills) all steps of the job. Nothing that they run has anything left to save: the driver asked for it.
end_steps() {
  squeue --steps --noheader --jobs="$SLURM_JOB_ID" --format=%i | grep -E '\.[0-9]+$' | xargs -r scancel
}
