import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** Says `ready`, waits for a line, works with several threads for some seconds, and prints what
    it has computed. Ends with status 7. */
class Work {
    static long work(int seed) {
        long sum = seed;
        Map<String, List<Integer>> map = new HashMap<>();
        for (int i = 0; i < 60000; i++) {
            sum = sum * 6364136223846793005L + 1442695040888963407L;
            map.computeIfAbsent("key" + (sum >>> 52), key -> new ArrayList<>()).add(i);
            try {
                if (i % 1000 == 0) throw new IllegalStateException("round " + i);
            } catch (IllegalStateException error) {
                sum += error.getMessage().length();
            }
        }
        for (Map.Entry<String, List<Integer>> entry : map.entrySet())
            sum ^= entry.getKey().hashCode() * (long) entry.getValue().size();
        return sum;
    }

    public static void main(String[] arguments) throws Exception {
        System.out.println("ready");
        System.in.read();
        long[] sums = new long[4];
        Thread[] threads = new Thread[sums.length];
        for (int t = 0; t < threads.length; t++) {
            final int me = t;
            threads[t] = new Thread(() -> {
                for (int round = 0; round < 40; round++) sums[me] += work(me * 1000 + round);
            });
            threads[t].start();
        }
        long all = 0;
        for (int t = 0; t < threads.length; t++) {
            threads[t].join();
            all = all * 31 + sums[t];
        }
        System.out.println(all);
        System.exit(7);
    }
}
