# The guard: stops what its parent started, when the parent is gone.
#
# Reads orders on stdin, one a line:
#   + PID SIGNAL   watch process group PID; on the end, ask it to stop with SIGNAL
#   - PID          it has ended, forget it
#   d PATH         remove this folder on the end
#   f PATH         it has been removed, forget it
# The end of stdin is the end of the parent, however it died: the kernel closes the pipe.
#
# Sent SIGNAL first, then SIGKILL after LIMIT_TENTHS tenths of a second; folders go last, so that
# nothing writes into them any more.
trap '' INT TERM HUP
LIMIT_TENTHS=50
watched=''
set --
while IFS= read -r line; do
  rest=${line#? }
  case $line in
    '+ '*) watched="$watched ${rest%% *}:${rest##* }" ;;
    '- '*)
      kept=''
      for entry in $watched; do
        [ "${entry%:*}" = "$rest" ] || kept="$kept $entry"
      done
      watched=$kept
      ;;
    'd '*) set -- "$@" "$rest" ;;
    'f '*)
      for folder in "$@"; do
        shift
        [ "$folder" = "$rest" ] || set -- "$@" "$folder"
      done
      ;;
  esac
done

# A process that has ended may wait long to be collected, where the first process of a container
# does not do that; it counts as gone.
any_alive() {
  for entry in $watched; do
    { IFS= read -r stat <"/proc/${entry%:*}/stat"; } 2>/dev/null || continue
    case ${stat##*) } in
      [ZX]*) ;;
      *) return 0 ;;
    esac
  done
  return 1
}

for entry in $watched; do
  # A frozen process does not act on anything but SIGKILL until it is thawed. The group is asked
  # only in the KILL case: a postmaster tells its own children.
  if [ "${entry#*:}" = KILL ]; then
    kill -KILL -"${entry%:*}" 2>/dev/null
  else
    kill -"${entry#*:}" "${entry%:*}" 2>/dev/null
    kill -CONT -"${entry%:*}" 2>/dev/null
  fi
done
tenths=0
while any_alive && [ "$tenths" -lt "$LIMIT_TENTHS" ]; do
  sleep 0.1
  tenths=$((tenths + 1))
done
for entry in $watched; do
  kill -KILL -"${entry%:*}" 2>/dev/null
done
[ $# -eq 0 ] || rm -rf -- "$@"
