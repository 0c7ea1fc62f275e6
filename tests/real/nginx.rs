//! nginx: a master that forks its workers, and does so again when told to.

use crate::entry::at_entry;
use crate::mode::Mode;
use crate::subject::{Moment, Session, Subject};
use anyhow::{Context, Result, ensure};
use elfremap_tests::image::Image;
use elfremap_tests::lab::{Lab, helper, seen, signal, wait_for_socket, wait_until};
use elfremap_tests::run::Run;
use nix::sys::signal::Signal;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

const PROGRAM: &str = "/usr/sbin/nginx";

const CONFIGURATION: &str = "
daemon off;
worker_processes 2;
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
    gzip_min_length 100;
    gzip_http_version 1.0;
    gzip_types text/plain;
    default_type text/plain;
    server {
        listen unix:sock;
        root files;
        location ~ ^/echo/(?<word>[a-z]+)$ { return 200 \"$word $request_method $http_x_test\\n\"; }
        location /moved/ { rewrite ^/moved/(.*)$ /$1 permanent; }
    }
}
";

/// The server as a subject.
///
/// # Errors
/// When it is not installed.
pub(crate) fn subject(lab: &Arc<Lab>) -> Result<Subject> {
    let version = Run::new(PROGRAM).arg("-v").output().context("nginx is not installed")?;
    println!("{}", String::from_utf8_lossy(&version.stderr).trim());
    let image = Image::read(Path::new(PROGRAM))?;
    let copy = image.clone();
    let scenario = Box::new(move |lab: &Lab, mode: &Mode| session(lab, mode, &image));
    Ok(Subject::new("nginx", Arc::clone(lab), copy, scenario))
}

fn session(lab: &Lab, mode: &Mode, image: &Image) -> Result<Session> {
    let dir = lab.fresh("nginx")?;
    fs::create_dir(dir.join("files"))?;
    let large: String = (0..150_000u32).map(|n| format!("{n}: {}\n", n.wrapping_mul(n))).collect();
    fs::write(dir.join("files/large.txt"), large)?;
    fs::write(dir.join("files/index.html"), "<p>It works</p>\n".repeat(40))?;
    fs::write(dir.join("conf"), CONFIGURATION)?;
    elfremap_tests::lab::chown_all(&dir, lab.user())?;
    let run =
        lab.run(PROGRAM).arg("-p").arg(&dir).args(["-c", "conf", "-e", "log"]).directory(&dir);
    let run = mode.apply(lab, run)?;
    let entry = at_entry(run.clone(), image)?;
    let server = run.start_waiting()?;
    let socket = dir.join("sock");
    let log = dir.join("log");
    wait_for_socket(&socket, &server, &log)?;

    let mut transcript = requests(lab, &socket)?;
    // New workers, forked by the master while it serves.
    let before = workers(&log)?;
    signal(&server, Signal::SIGHUP)?;
    wait_until(|| Ok(workers(&log)? >= before + 2)).context("no new workers")?;
    transcript += &requests(lab, &socket)?;
    let moment = Moment::now("master", server.pid(), image)?.forked();
    signal(&server, Signal::SIGQUIT)?;
    let output = server.finish()?;
    let log = fs::read_to_string(&log)?;
    ensure!(output.status.success(), "nginx ended with {}: {}{log}", output.status, seen(&output));
    ensure!(!log.contains("exited on signal"), "a worker died: {log}");
    lab.remove(&dir)?;
    Ok(Session { transcript, warnings: output.warnings(), moments: vec![entry, moment] })
}

/// Workers started so far.
fn workers(log: &Path) -> Result<usize> {
    Ok(fs::read_to_string(log)?.matches("start worker process ").count())
}

fn requests(lab: &Lab, socket: &Path) -> Result<String> {
    let mut text = String::new();
    for request in [
        "GET / HTTP/1.0\r\n\r\n",
        "GET /large.txt HTTP/1.0\r\n\r\n",
        "GET /large.txt HTTP/1.1\r\nHost: x\r\nRange: bytes=1000-1999,5000-5009\r\nConnection: close\r\n\r\n",
        "HEAD /index.html HTTP/1.0\r\n\r\n",
        "POST /echo/abc HTTP/1.0\r\nX-Test: yes\r\nContent-Length: 3\r\n\r\nxyz",
        "GET /moved/large.txt HTTP/1.0\r\n\r\n",
        "GET /nothing HTTP/1.0\r\n\r\n",
        "NONSENSE\r\n\r\n",
    ] {
        for line in answer(socket, request)?.split(|&b| b == b'\n') {
            // These depend on when the files were written and asked for.
            let line = line.escape_ascii().to_string();
            let timed = ["Date: ", "Last-Modified: ", "ETag: ", "--0", "Content-Type: multipart"];
            if !timed.iter().any(|name| line.starts_with(name)) {
                text += &format!("{line}\n");
            }
        }
    }
    // How much is compressed at a time depends on how fast the client reads.
    let packed = answer(socket, "GET /large.txt HTTP/1.0\r\nAccept-Encoding: gzip\r\n\r\n")?;
    let body = packed.windows(4).position(|end| end == b"\r\n\r\n").context("no body")? + 4;
    let file = lab.file("large.gz", &packed[body..])?;
    Ok(text + &helper(&Run::new("gzip").args(["--decompress", "--stdout"]).arg(file))?)
}

fn answer(socket: &Path, request: &str) -> Result<Vec<u8>> {
    let mut stream = UnixStream::connect(socket)?;
    stream.write_all(request.as_bytes())?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).with_context(|| format!("no answer to {request:?}"))?;
    Ok(answer)
}
