trap : INT
exec 0</dev/null
printf 'ready\n' >&7
