//! The real programs of the demo: what is installed here, with some seconds of work
//! for each.

use crate::measure::find_program;
use crate::runner::Job;
use crate::source::c_source;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// The programs that [`find`] looks for.
pub(super) const KNOWN: &str = "mariadbd, cc1, node, python3";

/// A program with work to do and an output to compare.
#[derive(Debug)]
pub(super) struct RealJob {
    pub name: &'static str,
    pub what: &'static str,
    /// The command as people would type it.
    pub shown: String,
    pub job: Job,
    /// Huge pages that are enough for it.
    pub pages: u64,
    /// Removed and made anew before each run.
    scratch: PathBuf,
    /// The file that it writes.
    output: PathBuf,
}

impl RealJob {
    /// Makes the job ready to run (again).
    pub(super) fn prepare(&self) -> Result<()> {
        if self.scratch.exists() {
            fs::remove_dir_all(&self.scratch)
                .with_context(|| format!("cannot remove {}", self.scratch.display()))?;
        }
        fs::create_dir_all(&self.scratch)
            .with_context(|| format!("cannot create {}", self.scratch.display()))
    }

    /// What the last run wrote.
    pub(super) fn output(&self) -> Result<Vec<u8>> {
        fs::read(&self.output).with_context(|| format!("cannot read {}", self.output.display()))
    }
}

/// The jobs for the programs that are here: a database and a compiler, or else an
/// interpreter.
pub(super) fn find(work: &Path) -> Result<Vec<RealJob>> {
    let work = work.canonicalize()?;
    let mut jobs = Vec::new();
    jobs.extend(find_program("mariadbd").map(|path| mariadbd(&path, &work)).transpose()?);
    jobs.extend(find_program("cc1").map(|path| cc1(&path, &work)).transpose()?);
    if jobs.is_empty() {
        jobs.extend(find_program("node").map(|path| node(&path, &work)).transpose()?);
    }
    if jobs.is_empty() {
        jobs.extend(find_program("python3").map(|path| python3(&path, &work)).transpose()?);
    }
    Ok(jobs)
}

fn mariadbd(program: &Path, work: &Path) -> Result<RealJob> {
    let (scratch, sql) = (work.join("mariadb"), work.join("demo.sql"));
    let output = scratch.join("result");
    let text = SQL.replace("@RESULT@", &output.to_string_lossy());
    fs::write(&sql, text).with_context(|| format!("cannot write {}", sql.display()))?;
    let data = format!("--datadir={}", scratch.display());
    let mut args = vec![
        "--no-defaults",
        "--bootstrap",
        &data,
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-doublewrite=0",
        "--innodb-flush-method=nosync",
    ];
    if nix::unistd::geteuid().is_root() {
        args.push("--user=root");
    }
    let mut job = Job::new(program, &args);
    job.stdin = Some(sql);
    Ok(RealJob {
        name: "mariadbd",
        what: "some seconds of SQL, without a client",
        shown: "mariadbd --no-defaults --bootstrap --datadir=... < demo.sql".into(),
        job,
        pages: 40,
        scratch,
        output,
    })
}

fn cc1(program: &Path, work: &Path) -> Result<RealJob> {
    let (scratch, source) = (work.join("cc1"), work.join("demo.c"));
    let output = scratch.join("demo.s");
    fs::write(&source, c_source(200))
        .with_context(|| format!("cannot write {}", source.display()))?;
    let mut job = Job::new(program, &["-quiet", "-O2"]);
    job.args.extend([source.into(), "-o".into(), output.clone().into()]);
    Ok(RealJob {
        name: "cc1",
        what: "the GNU C compiler proper, at 3200 lines of C",
        shown: "cc1 -quiet -O2 demo.c -o demo.s".into(),
        job,
        pages: 32,
        scratch,
        output,
    })
}

fn node(program: &Path, work: &Path) -> Result<RealJob> {
    script(
        "node",
        "parsing and printing JSON",
        program,
        work,
        "const o = []; for (let i = 0; i < 20000; i++) o.push({i, s: 'x'.repeat(i % 97)});\n\
         let t; for (let k = 0; k < 40; k++) t = JSON.stringify(JSON.parse(JSON.stringify(o)));\n\
         require('fs').writeFileSync(process.argv[2], String(t.length));\n",
        64,
    )
}

fn python3(program: &Path, work: &Path) -> Result<RealJob> {
    script(
        "python3",
        "parsing and printing its own code",
        program,
        work,
        "import ast, inspect, sys\n\
         text = ''.join(ast.unparse(ast.parse(inspect.getsource(ast))) for _ in range(8))\n\
         open(sys.argv[1], 'w').write(text)\n",
        16,
    )
}

/// A job of an interpreter: `program SCRIPT OUTPUT`.
fn script(
    name: &'static str,
    what: &'static str,
    program: &Path,
    work: &Path,
    text: &str,
    pages: u64,
) -> Result<RealJob> {
    let (scratch, source) = (work.join(name), work.join(format!("demo.{name}")));
    let output = scratch.join("result");
    fs::write(&source, text).with_context(|| format!("cannot write {}", source.display()))?;
    let mut job = Job::new(program, &[]);
    job.args.extend([source.into(), output.clone().into()]);
    Ok(RealJob { name, what, shown: format!("{name} demo.{name}"), job, pages, scratch, output })
}

/// Makes a table of 150 000 rows, joins it with itself, sorts and groups.
const SQL: &str = "\
set max_recursive_iterations = 1000000;
create database demo;
use demo;
create table t (id int primary key, a int, b varchar(40)) engine=innodb;
insert into t with recursive n as (select 1 as i union all select i + 1 from n where i < 150000)
  select i, i * 7919 % 10007, concat('row ', i * 31 % 977) from n;
create table r as select x.b, count(*) as n, sum(length(y.b)) as l, max(y.b) as m
  from t x join t y on y.id = x.id * 7 % 149993 + 1
  where x.b not like '%99%' and lower(y.b) < 'row 9' group by x.b order by l, m;
create table s as select concat(upper(x.b), '/', y.a % 50) as k, count(*) as n
  from t x join t y on y.id = x.a + 1 group by k order by n, k;
create table u as select soundex(x.b) as k, count(*) as n, min(reverse(y.b)) as m
  from t x join t y on y.id = x.id * 13 % 149993 + 1 group by k order by n, k;
select md5(group_concat(b, n, l, m order by b)) from r union all
  select md5(group_concat(k, n order by k)) from s union all
  select md5(group_concat(k, n, m order by k)) from u into outfile '@RESULT@';
";
