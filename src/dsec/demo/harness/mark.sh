# Sourced by a shell that runs a call (BASH_ENV): as `mark` of dsec-agent, which runs the others.
[ -z "$DSEC_CALL" ] || echo "$DSEC_CALL" >> /var/tmp/dsec-agent.calls
unset BASH_ENV DSEC_CALL
