# What a session's bash is told before its first command. Names that begin with __dsec_ are the session's own.
#
# A command that ends the shell (`exit`, `set -e`, an error in an expansion, an interrupt in the middle of a line) runs the EXIT
# trap: it writes the shell's state into an unnamed file and executes bash anew, in the same process, which reads it back.
# Descriptors: 20 takes reports (a pipe marked by its sticky bit), 21 is the input of commands (a pipe marked by its set-gid
# bit), 22 the file of the state (sticky). While a command runs they are moved aside and closed on exec, so the trap looks for
# the marks.
__dsec_exit= __dsec_int=- __dsec_rc=0 __dsec_reset=
__dsec_abort='case $BASH_COMMAND in *__dsec_*) ;; *) builtin trap - DEBUG; builtin exit 130 ;; esac'
__dsec_on_int='__dsec_rc=$?
case $__dsec_int in
  -) case $BASH_COMMAND in read|read\ *|mapfile*|readarray*) builtin exit 130 ;; esac
    case ${__dsec_debug+x} in "") __dsec_debug=$(builtin trap -p DEBUG) ;; esac; builtin trap "$__dsec_abort" DEBUG ;;
  *) builtin eval "$__dsec_int" ;;
esac'
__dsec_on_exit='__dsec_rc=$? __dsec_options=$(builtin set +o) __dsec_traps=$(builtin trap -p ERR DEBUG RETURN)
case $- in *e*) __dsec_options="$__dsec_options
set -o errexit" ;; esac
builtin trap - ERR DEBUG RETURN ${__dsec_none-}
builtin set +aeux +o posix +o noglob
case ${__dsec_exit:+x} in
  x) exit() { builtin unset -f exit; __dsec_rc=${1:-$__dsec_rc}; __dsec_leave; }
    (builtin exit "$__dsec_rc"); builtin eval "$__dsec_exit"; builtin unset -f exit ;;
esac
__dsec_leave "$@"'
__dsec_settle='case ${__dsec_debug+x} in x) builtin trap - DEBUG ${__dsec_none-}; builtin eval "$__dsec_debug"; builtin unset __dsec_debug ;; esac
case $__dsec_reset in ?*) builtin trap - $__dsec_reset; __dsec_reset= ;; esac'
__dsec_arm='builtin trap "$__dsec_on_exit" EXIT
case $__dsec_int in "") builtin trap "" INT ;; *) builtin trap "$__dsec_on_int" INT ;; esac'
# A signal that ends a shell ends the command, as `exit` does with its code, unless the user traps it: those in __dsec_theirs.
# Left to itself bash would run the EXIT trap without a word of the signal.
declare -A __dsec_theirs=() \
  __dsec_fatal=([HUP]=129 [USR1]=138 [USR2]=140 [PIPE]=141 [ALRM]=142 [TERM]=143 [XCPU]=152 [XFSZ]=153)
__dsec_endings='for __dsec_name in "${!__dsec_fatal[@]}"; do
  case ${__dsec_theirs[$__dsec_name]+x} in "") __dsec_on - "$__dsec_name" ;; esac
done'
__dsec_on() {
  builtin local name=${2^^}
  name=${name#SIG}
  case $name in
    1) name=HUP ;; 10) name=USR1 ;; 12) name=USR2 ;; 13) name=PIPE ;;
    14) name=ALRM ;; 15) name=TERM ;; 24) name=XCPU ;; 25) name=XFSZ ;;
  esac
  case ${__dsec_fatal[${name:-.}]+x}:$1 in
    x:-) builtin unset "__dsec_theirs[$name]"
      builtin trap "builtin exit \"${__dsec_fatal[$name]}\${__dsec_none-}\"" "$name" ;;
    x:*) builtin trap -- "$1" "$name" && __dsec_theirs[$name]= ;;
    *) builtin trap -- "$1" "$2" ;;
  esac
}
# ERR, DEBUG and RETURN see the user's commands, not ours around them.
__dsec_unseen='case $BASH_COMMAND in \\builtin\ \\eval*|*__dsec_*) ;; *)'
__dsec_save() { __dsec_rc=$1; }
__dsec_back() { case $-${__dsec_of_ERR+e} in *e*) builtin return 0 ;; *) builtin return "$__dsec_rc" ;; esac; }
__dsec_done() { builtin printf '%s %s\n' "$__dsec_word" "$__dsec_rc" >&20; }
__dsec_dump() {
  builtin shopt -p
  builtin declare -f
  builtin declare -Fx
  builtin declare -p
  builtin printf 'builtin set --'
  builtin printf ' %q' "$@"
  builtin echo
  builtin trap -p QUIT CHLD CONT TSTP TTIN TTOU WINCH "${!__dsec_theirs[@]}"
  builtin alias -p
  builtin echo '\builtin \eval ": >|/proc/self/fd/22"'
  builtin echo '\builtin \eval "$__dsec_endings"'
  builtin echo '\builtin \eval "$__dsec_arm"'
  builtin echo '\builtin \eval "$__dsec_traps"'
  builtin echo '\builtin \eval "$__dsec_options"'
}
__dsec_leave() {
  builtin local number path reports= input= state=
  for ((number = 3; number < 256; number++)); do
    path=/proc/self/fd/$number
    if [[ -k $path && -p $path ]]; then reports=$number
    elif [[ -g $path && -p $path ]]; then input=$number
    elif [[ -k $path && -f $path ]]; then state=$number; fi
  done
  [[ $reports && $input && $state ]] || builtin return
  case ${__dsec_debug+x} in x) __dsec_traps=$__dsec_debug; builtin unset __dsec_debug ;; esac
  __dsec_dump "$@" 2>/dev/null >|"/proc/self/fd/$state"
  builtin trap - HUP QUIT PIPE ALRM TERM USR1 USR2 CHLD CONT TSTP TTIN TTOU WINCH XCPU XFSZ
  BASH_ENV= builtin exec "$BASH" --norc --noprofile /dev/stdin \
    0<&"$reports" 20<&0 0<&"$input" 21<&0 22<>"/proc/self/fd/$state" 0<"/proc/self/fd/$__dsec_control"
}
trap() {
  builtin local action name status=0
  case $BASH_SUBSHELL:$#:${1-} in
    0:0:*|0:[1-9]*:-p*)
      case $# in [01])
        case $__dsec_exit in ?*) builtin printf 'trap -- %q EXIT\n' "$__dsec_exit" ;; esac
        case $__dsec_int in -) ;; *) builtin printf 'trap -- %q SIGINT\n' "$__dsec_int" ;; esac
        for name in ERR DEBUG RETURN; do
          action=__dsec_of_$name
          case ${!action+x} in x) builtin printf 'trap -- %q %s\n' "${!action}" "$name" ;; esac
        done
        builtin trap -p QUIT CHLD CONT TSTP TTIN TTOU WINCH "${!__dsec_theirs[@]}"
        builtin return ;;
      esac
      builtin trap "$@"; builtin return ;;
    0:*:-l*|[!0]*) builtin trap "$@"; builtin return ;;
    0:[1-9]*:--) builtin shift ;;
  esac
  action=${1-}
  case $#:$action in 1:*|*:[0-9]|*:[0-9][0-9]) action=- ;; *) builtin shift ;; esac
  for name; do
    case $name in
      0|[Ee][Xx][Ii][Tt]) case $action in -) __dsec_exit= ;; '') __dsec_exit=: ;; *) __dsec_exit=$action ;; esac ;;
      2|[Ii][Nn][Tt]|[Ss][Ii][Gg][Ii][Nn][Tt]) __dsec_int=$action; builtin eval "$__dsec_arm" ;;
      ERR|DEBUG|RETURN)
        case $action in
          -) builtin trap : "$name"; __dsec_reset="$__dsec_reset $name"; builtin unset "__dsec_of_$name" ;;
          *) builtin trap -- "${action:+$__dsec_unseen
$action
;; esac}" "$name"
            __dsec_reset=${__dsec_reset// $name}; builtin printf -v "__dsec_of_$name" %s "$action" ;;
        esac ;;
      *) __dsec_on "$action" "$name" || status=1 ;;
    esac
  done
  builtin return "$status"
}
# The descriptor from which this shell reads its script: bash itself keeps it from children, wherever it is moved.
__dsec_arm='__dsec_control=255
while [[ ! /proc/self/fd/$__dsec_control -ef /dev/stdin && $__dsec_control -gt 3 ]]; do ((__dsec_control--)); done
builtin exec 0</dev/null
'"$__dsec_arm"
builtin eval "$__dsec_endings"
builtin eval "$__dsec_arm"
builtin printf 'ready\n' >&20
