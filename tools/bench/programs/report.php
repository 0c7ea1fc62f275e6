<?php
// A report out of a table in memory: strings, arrays, regular expressions, sorting.
$state = 1;
function below(int $bound): int {
    global $state;
    $state = ($state * 1103515245 + 12345) & 0x7fffffff;
    return ($state >> 8) % $bound;
}
$sum = 0;
for ($round = 0; $round < 12; $round++) {
    $rows = [];
    for ($i = 0; $i < 12000; $i++) {
        $rows[] = ['id' => $i, 'name' => 'row ' . below(977), 'amount' => below(10007) / 8, 'note' => str_repeat('ab ', below(8))];
    }
    usort($rows, fn($a, $b) => [$a['name'], $a['amount'], $a['id']] <=> [$b['name'], $b['amount'], $b['id']]);
    $groups = [];
    foreach ($rows as $row) {
        $key = preg_replace('/^row (\d)(\d*)$/', '$2-$1', $row['name']);
        $groups[$key]['n'] = ($groups[$key]['n'] ?? 0) + 1;
        $groups[$key]['sum'] = ($groups[$key]['sum'] ?? 0) + $row['amount'];
        $groups[$key]['text'] = substr(md5(($groups[$key]['text'] ?? '') . ucwords($row['note'])), 0, 12);
    }
    ksort($groups, SORT_STRING);
    $text = '';
    foreach ($groups as $key => $group) {
        $text .= sprintf("%-8s %6d %10.2f %s\n", $key, $group['n'], $group['sum'], htmlspecialchars($group['text']));
    }
    $sum = crc32($sum . $text . json_encode(json_decode(json_encode(array_slice($groups, 0, 50)), true)));
}
echo $sum, "\n";
