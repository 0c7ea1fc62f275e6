//! Servers that fork: workers beforehand, a process for each client, a snapshot.

use crate::{Look, Setting};
use anyhow::{Context, Result, ensure};
use elfremap_tests::lab::{Lab, chown_all, helper, seen, signal, wait_for_socket, wait_until};
use elfremap_tests::library;
use elfremap_tests::run::{Run, Running};
use nix::sys::signal::Signal;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Sends `request` and reads the answer to its end.
fn ask(socket: &Path, request: &[u8]) -> Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket)?;
    stream.write_all(request)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(answer)
}

/// `count` requests by four clients at a time, in the order of their numbers.
fn ask_all(count: usize, one: impl Fn(usize) -> Result<String> + Sync) -> Result<String> {
    const CLIENTS: usize = 4;
    let one = &one;
    let answers: Vec<Result<Vec<String>>> = std::thread::scope(|scope| {
        let client = |me: usize| {
            scope.spawn(move || (me..count).step_by(CLIENTS).map(one).collect::<Result<Vec<_>>>())
        };
        let clients: Vec<_> = (0..CLIENTS).map(client).collect();
        clients
            .into_iter()
            .map(|client| {
                client.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a client panicked")))
            })
            .collect()
    });
    let answers = answers.into_iter().collect::<Result<Vec<_>>>()?;
    Ok((0..count).map(|n| answers[n % CLIENTS][n / CLIENTS].as_str()).collect())
}

/// Ends the server by `with`, and says how it ended.
fn stop(server: Running, with: Signal, log: &Path) -> Result<String> {
    signal(&server, with)?;
    let output = server.finish()?;
    let log = fs::read_to_string(log).unwrap_or_default();
    ensure!(output.status.success(), "ended with {}: {}{log}", output.status, seen(&output));
    ensure!(!log.contains("on signal"), "a worker died: {log}");
    Ok(seen(&output))
}

pub(crate) fn prefork_program(lab: &Lab) -> Result<PathBuf> {
    let program = lab.path().join("prefork");
    if !program.exists() {
        let source = library::source_dir().join("forks/prefork.c");
        helper(&Run::new("cc").args(["-O1", "-Wall", "-o"]).arg(&program).arg(source))?;
    }
    Ok(program)
}

/// 300 requests, with a new worker for every 15 of them.
pub(crate) fn prefork(setting: &Setting<'_>, look: Look<'_>) -> Result<String> {
    let dir = setting.lab.fresh("prefork-run")?;
    let socket = dir.join("sock");
    let server = setting.run()?.arg(&socket).start_waiting()?;
    let log = Path::new("/dev/null");
    wait_until(|| Ok(socket.exists()))?;
    look(server.pid())?;
    let answers =
        ask_all(300, |n| Ok(String::from_utf8(ask(&socket, n.to_string().as_bytes())?)?))?;
    look(server.pid())?;
    Ok(answers + &stop(server, Signal::SIGTERM, log)?)
}

/// Debian's redis-tools has the server too, under the name of a tool.
pub(crate) fn redis_program(_: &Lab) -> Result<PathBuf> {
    Path::new("/usr/bin/redis-check-rdb").canonicalize().context("redis-tools is not installed")
}

/// Snapshots by forked children while clients write.
pub(crate) fn redis(setting: &Setting<'_>, look: Look<'_>) -> Result<String> {
    let dir = setting.lab.fresh("redis-run")?;
    let (socket, log) = (dir.join("sock"), dir.join("log"));
    let run = setting.run()?.name("redis-server").args(["--port", "0", "--save", ""]);
    let run = run.arg("--unixsocket").arg(&socket).args(["--enable-debug-command", "local"]);
    let run = run.arg("--dir").arg(&dir).arg("--logfile").arg(&log).directory(&dir);
    let server = run.start_waiting()?;
    wait_for_socket(&socket, &server, &log)?;
    look(server.pid())?;
    let cli = |words: &[&str]| helper(&Run::new("redis-cli").arg("-s").arg(&socket).args(words));
    let mut text = cli(&["DEBUG", "POPULATE", "50000", "item", "100"])?;
    for _ in 0..4 {
        let bench = Run::new("redis-benchmark").arg("-s").arg(&socket);
        let bench = bench.args(["-q", "-n", "4000", "-c", "10", "-t", "set,incr,lpush,hset"]);
        let bench = bench.start_waiting()?;
        cli(&["BGSAVE"])?;
        wait_until(|| Ok(cli(&["INFO", "persistence"])?.contains("rdb_bgsave_in_progress:0")))?;
        let saved = cli(&["INFO", "persistence"])?;
        text += saved.lines().find(|l| l.starts_with("rdb_last_bgsave_status")).unwrap_or("none");
        cli(&["BGREWRITEAOF"])?;
        wait_until(|| Ok(cli(&["INFO", "persistence"])?.contains("aof_rewrite_in_progress:0")))?;
        ensure!(bench.finish()?.status.success(), "redis-benchmark failed");
    }
    text += &cli(&["DEBUG", "DIGEST"])?;
    // What the last child wrote is a whole file.
    cli(&["BGSAVE"])?;
    wait_until(|| Ok(cli(&["INFO", "persistence"])?.contains("rdb_bgsave_in_progress:0")))?;
    text += &cli(&["DEBUG", "RELOAD", "NOSAVE"])?;
    text += &cli(&["DEBUG", "DIGEST"])?;
    look(server.pid())?;
    Ok(text + &stop(server, Signal::SIGTERM, &log)?)
}

const NGINX: &str = "
daemon off;
worker_processes 4;
pid pid;
error_log log notice;
events { worker_connections 64; }
http {
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    gzip on;
    server {
        listen unix:sock;
        location / { return 200 \"$request_uri $request_method\\n\"; }
    }
}
";

pub(crate) fn nginx_program(_: &Lab) -> Result<PathBuf> {
    Path::new("/usr/sbin/nginx").canonicalize().context("nginx is not installed")
}

/// Requests, with new workers three times in between.
pub(crate) fn nginx(setting: &Setting<'_>, look: Look<'_>) -> Result<String> {
    let dir = setting.lab.fresh("nginx-run")?;
    fs::write(dir.join("conf"), NGINX)?;
    chown_all(&dir, setting.lab.user())?;
    let (socket, log) = (dir.join("sock"), dir.join("log"));
    let run = setting.run()?.arg("-p").arg(&dir).args(["-c", "conf", "-e", "log"]).directory(&dir);
    let server = run.start_waiting()?;
    wait_for_socket(&socket, &server, &log)?;
    look(server.pid())?;
    let workers = || Ok(fs::read_to_string(&log)?.matches("start worker process ").count());
    let mut text = String::new();
    for round in 0..4 {
        text += &ask_all(100, |n| {
            let answer = ask(&socket, format!("GET /{round}/{n} HTTP/1.0\r\n\r\n").as_bytes())?;
            let answer = String::from_utf8(answer)?;
            Ok(answer.lines().filter(|line| !line.starts_with("Date: ")).collect())
        })?;
        let before: Result<usize> = workers();
        let before = before?;
        signal(&server, Signal::SIGHUP)?;
        wait_until(|| Ok(workers()? >= before + 4)).context("no new workers")?;
    }
    look(server.pid())?;
    Ok(text + &stop(server, Signal::SIGQUIT, &log)?)
}

const PHP: &str = "<?php
ini_set('display_errors', '1');
function f($n) { return $n < 2 ? $n : f($n - 1) + f($n - 2); }
$n = (int) $_GET['n'];
$words = [];
for ($i = 0; $i < 500; $i++) $words[\"word-$i\"] = sha1(\"$i-$n\");
usort($words, fn($a, $b) => strcmp($a, $b));
echo f(10 + $n % 8), ' ', $words[$n % 500], ' ', preg_replace('/(\\d+)/', '<$1>', \"a${n}b\"), ' ';
if ($n % 10 == 0) echo trim(shell_exec(\"echo from the shell $n\"));
echo \"\\n\";
";

pub(crate) fn php_program(_: &Lab) -> Result<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir("/usr/sbin")?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("php-fpm"))
        })
        .collect();
    found.sort();
    found.pop().context("php-fpm is not installed")
}

/// 200 requests; each worker ends after 15, and the master forks another.
pub(crate) fn php(setting: &Setting<'_>, look: Look<'_>) -> Result<String> {
    let dir = setting.lab.fresh("php-run")?;
    let (socket, log) = (dir.join("sock"), dir.join("log"));
    let configuration = format!(
        "[global]\nerror_log = {}\ndaemonize = no\n[www]\nlisten = {}\npm = static\n\
         pm.max_children = 4\npm.max_requests = 15\ncatch_workers_output = yes\n",
        log.display(),
        socket.display()
    );
    fs::write(dir.join("conf"), configuration)?;
    fs::write(dir.join("page.php"), PHP)?;
    chown_all(&dir, setting.lab.user())?;
    let run = setting.run()?.args(["-n", "-F", "-y"]).arg(dir.join("conf")).directory(&dir);
    let server = run.start_waiting()?;
    wait_for_socket(&socket, &server, &log)?;
    look(server.pid())?;
    let page = dir.join("page.php");
    let text = ask_all(200, |n| fastcgi(&socket, &page, &format!("n={n}")))?;
    ensure!(text.contains("from the shell 190"), "no answers: {text}");
    look(server.pid())?;
    // Its own notices hold times and process ids.
    let end = stop(server, Signal::SIGQUIT, &log)?;
    let end: String = end.lines().filter(|line| !line.contains("NOTICE")).collect();
    Ok(text + &end)
}

/// One request by the FastCGI protocol, version 1; the answer's body.
fn fastcgi(socket: &Path, script: &Path, query: &str) -> Result<String> {
    let record = |kind: u8, content: &[u8]| -> Result<Vec<u8>> {
        // Version, type, request 1, length, no padding.
        let mut record = vec![1, kind, 0, 1];
        record.extend(u16::try_from(content.len())?.to_be_bytes());
        record.extend([0, 0]);
        record.extend(content);
        Ok(record)
    };
    let mut parameters = Vec::new();
    let script = script.to_str().context("a path that is text")?;
    for (name, value) in
        [("SCRIPT_FILENAME", script), ("QUERY_STRING", query), ("REQUEST_METHOD", "GET")]
    {
        parameters.extend([u8::try_from(name.len())?, u8::try_from(value.len())?]);
        parameters.extend(name.bytes().chain(value.bytes()));
    }
    let request = [
        // Role: responder; the connection is closed afterwards.
        record(1, &[0, 1, 0, 0, 0, 0, 0, 0])?,
        record(4, &parameters)?,
        record(4, &[])?,
        record(5, &[])?,
    ];
    let answer = ask(socket, &request.concat())?;
    let (mut out, mut rest) = (Vec::new(), &answer[..]);
    while let Some((head, tail)) = rest.split_first_chunk::<8>() {
        let length = usize::from(u16::from_be_bytes([head[4], head[5]]));
        let content = tail.get(..length).context("an answer cut short")?;
        if head[1] == 6 || head[1] == 7 {
            out.extend(content);
        }
        rest = tail.get(length + usize::from(head[6])..).unwrap_or_default();
    }
    let text = String::from_utf8(out)?;
    let body = text.split_once("\r\n\r\n").with_context(|| format!("no body: {text:?}"))?.1;
    Ok(body.to_owned())
}

fn postgres_directory() -> Result<PathBuf> {
    let mut versions: Vec<_> = fs::read_dir("/usr/lib/postgresql")
        .context("postgresql is not installed")?
        .map(|entry| entry.map(|e| e.path().join("bin")))
        .collect::<Result<_, _>>()?;
    versions.retain(|dir| dir.join("postgres").exists());
    versions.sort();
    versions.pop().context("no server in /usr/lib/postgresql")
}

pub(crate) fn postgres_program(_: &Lab) -> Result<PathBuf> {
    Ok(postgres_directory()?.join("postgres"))
}

/// 50 clients at once, each with a process of its own.
pub(crate) fn postgres(setting: &Setting<'_>, look: Look<'_>) -> Result<String> {
    let bin = postgres_directory()?;
    let template = setting.lab.path().join("postgres-template");
    if !template.exists() {
        let dir = setting.lab.fresh("postgres-template")?;
        let initdb = setting.lab.run(bin.join("initdb")).args(["--no-sync", "--auth=trust"]);
        let initdb = initdb.args(["--username=me", "--locale=C", "--encoding=UTF8", "-D"]);
        helper(&initdb.arg(dir.join("data")).directory(&dir))?;
    }
    let dir = setting.lab.fresh("postgres-run")?;
    let data = dir.join("data");
    helper(&Run::new("cp").arg("-a").arg(template.join("data")).arg(&dir))?;
    chown_all(&dir, setting.lab.user())?;
    let mut run = setting.run()?.arg("-D").arg(&data).directory(&dir);
    // Its own huge pages (huge_pages=try) would be counted among ours.
    for option in [
        &format!("unix_socket_directories={}", dir.display()),
        "listen_addresses=",
        "huge_pages=off",
        "shared_buffers=16MB",
        "max_connections=60",
        "fsync=off",
        "logging_collector=off",
    ] {
        run = run.arg("-c").arg(option);
    }
    let server = run.start_waiting()?;
    let client = |program: &str| {
        let run = Run::new(bin.join(program)).env("PGHOST", &dir).env("PGUSER", "me");
        run.env("PGDATABASE", "postgres")
    };
    wait_for_socket(&dir.join(".s.PGSQL.5432"), &server, Path::new("/dev/null"))?;
    wait_until(|| Ok(client("pg_isready").output()?.status.success()))?;
    look(server.pid())?;
    helper(&client("pgbench").args(["--initialize", "--quiet", "--scale=1"]))?;
    let bench = client("pgbench").args(["--client=50", "--jobs=2", "--transactions=20", "-N"]);
    let bench = seen(&bench.output()?);
    let counts = bench.lines().filter(|line| line.starts_with("number of"));
    let mut text: String = counts.map(|line| format!("{line}\n")).collect();
    text += &helper(&client("psql").args([
        "-XAtc",
        "
        SELECT count(*), sum(delta) = (SELECT sum(abalance) FROM pgbench_accounts)
        FROM pgbench_history",
    ]))?;
    look(server.pid())?;
    signal(&server, Signal::SIGINT)?;
    let output = server.finish()?;
    let log = seen(&output);
    ensure!(output.status.success(), "ended with {}: {log}", output.status);
    ensure!(!log.contains("was terminated by signal"), "a process died: {log}");
    Ok(text)
}
