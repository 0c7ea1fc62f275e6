# Forks without exec, in every way that bash has; subshells change what they inherit.
echo ready
read -r _
squares() { local i; for ((i = 1; i <= $1; i++)); do echo $((i * i)); done; }
total=0 names=()
for ((i = 0; i < 80; i++)); do
    names+=("name-$i")
    value=$(names+=(inner); total=$((total + i)); echo "$total ${#names[@]} $(echo "$i")")
    ( total=-1; names=(); [ "${#names[@]}" -eq 0 ] ) || echo "subshell $i failed"
    total=$((total + ${value%% *}))
done
echo "total $total, ${#names[@]} names, last ${names[79]}"
squares 200 | while read -r n; do echo $((n % 97)); done | sort -n | uniq -c | head -5
while read -r line; do sum=$((sum + line)); done < <(squares 100)
echo "sum $sum"
statuses=0
for ((i = 0; i < 30; i++)); do ( for ((j = 0; j < 200; j++)); do names+=("$j"); done; exit $((i % 7)) ) & jobs_[i]=$!; done
for pid in "${jobs_[@]}"; do wait "$pid"; statuses=$((statuses + $?)); done
echo "statuses $statuses"
coproc helper { while read -r n; do echo $((n * 2)); done; }
for ((i = 0; i < 20; i++)); do echo "$i" >&"${helper[1]}"; read -r answer <&"${helper[0]}"; printf '%s ' "$answer"; done
eval "exec ${helper[1]}>&-"
echo
trap 'echo "signal in $BASH_SUBSHELL"' USR1
( kill -USR1 $BASHPID )
echo "$( ( echo "$( ( echo "$(echo deep)" ) )" ) )"
echo checked
read -r _
echo "end $total"
