//! Breaks the product on purpose, one seeded bug at a time, and asks whether the test named for it notices.
//!
//! Each file of `crates/proving/mutants` is one bug: a file of the product, the exact text to find there, what to put in
//! its place, and the package and filter of the tests that must fail. The bugs are planted in a copy of the tree below
//! `target/mutants`, never here. A text that is not found exactly once is an error: whoever moves the line moves the bug.
//!
//! `mutants` runs all of them, `mutants NAME…` those whose names contain one of these, `mutants --pick N SEED` N of them
//! chosen by a seed, `mutants --check` only looks whether the texts are found. What was answered for the same bug in the
//! same tree is not asked again. It ends with 1 if a bug survives. Run it below `with-databases`.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use postrider::clock::Tick;
use serde::Deserialize;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const SOURCES: &str = "crates/proving/mutants";
const PLACE: &str = "target/mutants";

/// A seeded bug.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Mutant {
    /// What it breaks, in a sentence.
    breaks: String,
    file: PathBuf,
    find: String,
    replace: String,
    package: String,
    /// The test target; `lib` for unit tests.
    #[serde(default = "it")]
    target: String,
    /// Filters of the tests that must notice.
    tests: Vec<String>,
}

fn it() -> String {
    "it".to_owned()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// The tests failed, as they should.
    Found,
    Survived,
    DoesNotCompile,
}

impl Verdict {
    const ALL: [(Verdict, &str); 3] =
        [(Verdict::Found, "found"), (Verdict::Survived, "SURVIVED"), (Verdict::DoesNotCompile, "DOES NOT COMPILE")];

    fn word(self) -> &'static str {
        Self::ALL.iter().find(|(verdict, _)| *verdict == self).map_or("", |(_, word)| word)
    }

    fn of(word: &str) -> Option<Verdict> {
        Self::ALL.iter().find(|(_, name)| *name == word).map(|(verdict, _)| *verdict)
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("mutants: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &[String]) -> Result<bool> {
    let all = read_all()?;
    for (name, mutant) in &all {
        planted(mutant).map_err(|e| format!("{name}: {e}"))?;
    }
    let chosen: Vec<&(String, Mutant)> = match args {
        [] => all.iter().collect(),
        [check] if check == "--check" => {
            println!("{} bugs, each found at its place", all.len());
            return Ok(true);
        }
        [pick, count, seed] if pick == "--pick" => pick_some(&all, count.parse()?, seed),
        names => all.iter().filter(|(name, _)| names.iter().any(|part| name.contains(part.as_str()))).collect(),
    };
    if chosen.is_empty() {
        return Err("no bug has such a name".into());
    }
    let tree = copy_tree()?;
    let version = version_of(&tree)?;
    let mut answers = Answers::read()?;
    let mut survivors = 0;
    for (name, mutant) in chosen {
        let source = std::fs::read_to_string(Path::new(SOURCES).join(name))?;
        let asked = format!("{name} {:016x}", fingerprint(format!("{version}{source}").as_bytes()));
        let since = Tick::now();
        let (verdict, how) = match answers.get(&asked) {
            Some(verdict) => (verdict, "as before".to_owned()),
            None => {
                let verdict = ask(&tree, mutant)?;
                answers.put(&asked, verdict)?;
                (verdict, format!("{:.0} s", Tick::now().since(since).as_secs_f64()))
            }
        };
        println!("{:16} {name}: {} ({how})", verdict.word(), mutant.breaks);
        survivors += u32::from(verdict != Verdict::Found);
    }
    if survivors > 0 {
        println!("{survivors} not found");
    }
    Ok(survivors == 0)
}

fn read_all() -> Result<Vec<(String, Mutant)>> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(SOURCES).map_err(|e| format!("{SOURCES}: {e}; run it from the repository's root"))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".toml") {
            let mutant = toml::from_str(&std::fs::read_to_string(&path)?).map_err(|e| format!("{name}: {e}"))?;
            all.push((name, mutant));
        }
    }
    all.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(all)
}

/// The file with the bug in it.
fn planted(mutant: &Mutant) -> Result<String> {
    let text = std::fs::read_to_string(&mutant.file).map_err(|e| format!("{}: {e}", mutant.file.display()))?;
    match text.matches(mutant.find.as_str()).count() {
        1 if mutant.find == mutant.replace => Err("it changes nothing".into()),
        1 => Ok(text.replacen(&mutant.find, &mutant.replace, 1)),
        n => {
            Err(format!("its text stands {n} times in {}, not once: move the bug along", mutant.file.display()).into())
        }
    }
}

/// So many of them, chosen by the seed alone.
fn pick_some<'a>(all: &'a [(String, Mutant)], count: usize, seed: &str) -> Vec<&'a (String, Mutant)> {
    let mut order: Vec<&(String, Mutant)> = all.iter().collect();
    order.sort_by_key(|(name, _)| fingerprint(format!("{seed} {name}").as_bytes()));
    order.truncate(count);
    order
}

/// FNV-1a: the same in every version of everything.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// What Git knows of, and what it does not yet. Files that are the same stay as they are, so that little is built anew.
fn copy_tree() -> Result<PathBuf> {
    let tree = Path::new(PLACE).join("tree");
    let listed = Command::new("git").args(["ls-files", "-z", "-co", "--exclude-standard"]).output()?;
    if !listed.status.success() {
        return Err("git cannot list the files of this tree".into());
    }
    let mut wanted = std::collections::BTreeSet::new();
    for name in String::from_utf8(listed.stdout)?.split('\0').filter(|name| !name.is_empty()) {
        let (from, to) = (Path::new(name), tree.join(name));
        let Ok(bytes) = std::fs::read(from) else { continue };
        wanted.insert(to.clone());
        if std::fs::read(&to).ok().as_deref() != Some(&bytes) {
            std::fs::create_dir_all(to.parent().unwrap_or(&tree))?;
            std::fs::copy(from, &to)?;
        }
    }
    remove_others(&tree, &wanted)?;
    Ok(tree)
}

fn remove_others(folder: &Path, wanted: &std::collections::BTreeSet<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(&path, wanted)?;
        } else if !wanted.contains(&path) {
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// Of everything but the bugs themselves.
fn version_of(tree: &Path) -> Result<String> {
    let mut sum = 0;
    let mut folders = vec![tree.join("crates"), tree.join("Cargo.lock"), tree.join("Cargo.toml")];
    while let Some(path) = folders.pop() {
        if path.is_dir() && !path.ends_with(SOURCES) {
            for entry in std::fs::read_dir(path)? {
                folders.push(entry?.path());
            }
        } else if path.is_file() {
            let name = path.to_string_lossy().into_owned();
            sum ^= fingerprint(&[name.as_bytes(), &std::fs::read(&path)?].concat());
        }
    }
    Ok(format!("{sum:016x}"))
}

fn ask(tree: &Path, mutant: &Mutant) -> Result<Verdict> {
    let file = tree.join(&mutant.file);
    let whole = std::fs::read(&mutant.file)?;
    std::fs::write(&file, planted(mutant)?)?;
    let verdict = judge(tree, mutant);
    std::fs::write(&file, whole)?;
    verdict
}

fn judge(tree: &Path, mutant: &Mutant) -> Result<Verdict> {
    let log = std::fs::File::create(Path::new(PLACE).join("log"))?;
    let target = std::path::absolute(Path::new(PLACE).join("target"))?;
    let cargo = |run: &[&str]| -> Result<bool> {
        let mut command = Command::new("cargo");
        command.current_dir(tree).env("CARGO_TARGET_DIR", &target);
        command.args(["test", "--locked", "--quiet", "--all-features", "-p", &mutant.package]);
        match mutant.target.as_str() {
            "lib" => command.arg("--lib"),
            target => command.args(["--test", target]),
        };
        command.args(run).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log.try_clone()?);
        Ok(command.status()?.success())
    };
    if !cargo(&["--no-run"])? {
        return Ok(Verdict::DoesNotCompile);
    }
    let mut run = vec!["--"];
    run.extend(mutant.tests.iter().map(String::as_str));
    Ok(if cargo(&run)? { Verdict::Survived } else { Verdict::Found })
}

/// What was answered before.
struct Answers(BTreeMap<String, Verdict>);

impl Answers {
    fn file() -> PathBuf {
        Path::new(PLACE).join("answers")
    }

    fn read() -> Result<Answers> {
        let text = std::fs::read_to_string(Self::file()).unwrap_or_default();
        let line =
            |line: &str| line.split_once('\t').and_then(|(asked, word)| Some((asked.to_owned(), Verdict::of(word)?)));
        Ok(Answers(text.lines().filter_map(line).collect()))
    }

    fn get(&self, asked: &str) -> Option<Verdict> {
        self.0.get(asked).copied()
    }

    /// Only what was found is remembered: whoever mends a test wants to see it again.
    fn put(&mut self, asked: &str, verdict: Verdict) -> Result<()> {
        if verdict == Verdict::Found {
            self.0.insert(asked.to_owned(), verdict);
            let lines: String =
                self.0.iter().map(|(asked, verdict)| format!("{asked}\t{}\n", verdict.word())).collect();
            std::fs::write(Self::file(), lines)?;
        }
        Ok(())
    }
}
