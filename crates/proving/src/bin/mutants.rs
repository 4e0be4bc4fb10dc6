//! Breaks the product on purpose, one seeded bug at a time, and asks whether the test named for it notices.
//!
//! Each file of `crates/proving/mutants` is one bug: a file of the product, the exact text to find there, what to put in
//! its place, and the package and filter of the tests that must fail. The bugs are planted in a copy of the tree below
//! `target/mutants`, never here. A text that is not found exactly once is an error: whoever moves the line moves the bug.
//!
//! `mutants` runs all of them, `mutants NAME…` those whose names contain one of these, `mutants --pick N SEED` N of them
//! chosen by a seed among those that are built soon, `mutants --check` only looks whether the texts are found, and
//! `mutants --unbroken [NAME…]` runs the tests they name without them: a test that fails anyway finds nothing. What was
//! answered for the same bug in the same crates is not asked again. It ends with 1 if a bug survives. Run it below
//! `with-databases`.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::Duration;

use postrider::clock::Tick;
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Deserialize;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const SOURCES: &str = "crates/proving/mutants";
const PLACE: &str = "target/mutants";
/// What the tree's own tests are built into. Only read.
const BUILT: &str = "target/debug";
/// Tests that take this long hang.
const DEADLINE: Duration = Duration::from_secs(300);
/// Building the tests of the first takes longer than those of all others together, and running those of the second.
const LATE: [&str; 2] = ["postrider-server", "simulator"];

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
    /// The test target; for unit tests `lib`, or `unit` where the package is a command.
    #[serde(default = "it")]
    target: String,
    /// Filters of the tests that must notice.
    tests: Vec<String>,
    /// They are run only when they are asked for.
    #[serde(default)]
    ignored: bool,
}

/// Where tests are, and how they are run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Suite<'a> {
    package: &'a str,
    target: &'a str,
    ignored: bool,
}

impl Mutant {
    fn suite(&self) -> Suite<'_> {
        Suite { package: &self.package, target: &self.target, ignored: self.ignored }
    }
}

fn it() -> String {
    "it".to_owned()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// The tests failed, as they should.
    Found,
    /// They did not end, which nobody overlooks either.
    Hung,
    Survived,
    NoSuchTest,
    DoesNotCompile,
}

impl Verdict {
    const ALL: [(Verdict, &str); 5] = [
        (Verdict::Found, "found"),
        (Verdict::Hung, "found, hung"),
        (Verdict::Survived, "SURVIVED"),
        (Verdict::NoSuchTest, "NO SUCH TEST"),
        (Verdict::DoesNotCompile, "DOES NOT COMPILE"),
    ];

    fn word(self) -> &'static str {
        Self::ALL.iter().find(|(verdict, _)| *verdict == self).map_or("", |(_, word)| word)
    }

    fn of(word: &str) -> Option<Verdict> {
        Self::ALL.iter().find(|(_, name)| *name == word).map(|(verdict, _)| *verdict)
    }

    fn noticed(self) -> bool {
        matches!(self, Verdict::Found | Verdict::Hung)
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
    match args {
        [check] if check == "--check" => {
            println!("{} bugs, each found at its place", all.len());
            Ok(true)
        }
        [unbroken, names @ ..] if unbroken == "--unbroken" => {
            let chosen: Vec<&Mutant> = named(&all, names)?.into_iter().map(|(_, mutant)| mutant).collect();
            pass_unbroken(&Place::prepare()?, &chosen)
        }
        [pick, count, seed] if pick == "--pick" => hunt(&pick_some(&all, count.parse()?, seed)),
        names => hunt(&named(&all, names)?),
    }
}

/// All of them, or those whose names contain one of these.
fn named<'a>(all: &'a [(String, Mutant)], names: &[String]) -> Result<Vec<&'a (String, Mutant)>> {
    let wanted = |name: &str| names.is_empty() || names.iter().any(|part| name.contains(part.as_str()));
    let chosen: Vec<_> = all.iter().filter(|(name, _)| wanted(name)).collect();
    if chosen.is_empty() { Err("no bug has such a name".into()) } else { Ok(chosen) }
}

fn hunt(chosen: &[&(String, Mutant)]) -> Result<bool> {
    let place = Place::prepare()?;
    let mut answers = Answers::read();
    let mut survivors = 0;
    let mut questions = Vec::new();
    for (name, mutant) in chosen {
        let source = fs::read_to_string(Path::new(SOURCES).join(name))?;
        let version = place.version_of(mutant)?;
        let asked = format!("{name} {:016x}", fingerprint(format!("{version}{source}").as_bytes()));
        questions.push((asked, name, mutant));
    }
    // A test that fails without any bug, or for want of a server, would find all of them.
    let open: Vec<&Mutant> =
        questions.iter().filter(|(asked, ..)| answers.get(asked).is_none()).map(|(.., mutant)| *mutant).collect();
    if !pass_unbroken(&place, &open)? {
        return Err(format!("tests fail without any bug; what the last ones said is in {PLACE}/log").into());
    }
    for (asked, name, mutant) in questions {
        let since = Tick::now();
        let (verdict, how) = match answers.get(&asked) {
            Some(verdict) => (verdict, "as before".to_owned()),
            None => {
                let verdict = place.ask(mutant)?;
                answers.put(&asked, verdict)?;
                (verdict, format!("{:.0} s", Tick::now().since(since).as_secs_f64()))
            }
        };
        println!("{:16} {name}: {} ({how})", verdict.word(), mutant.breaks);
        survivors += u32::from(!verdict.noticed());
    }
    if survivors > 0 {
        println!("{survivors} not found; what the last one's tests said is in {PLACE}/log");
    }
    Ok(survivors == 0)
}

/// The tests these bugs name, on the product as it is: each package's together.
fn pass_unbroken(place: &Place, chosen: &[&Mutant]) -> Result<bool> {
    let mut suites: BTreeMap<Suite<'_>, BTreeSet<&str>> = BTreeMap::new();
    for mutant in chosen {
        let suite = suites.entry(mutant.suite()).or_default();
        suite.extend(mutant.tests.iter().map(String::as_str));
    }
    let mut sound = true;
    for (suite, tests) in suites {
        let verdict = place.judge(suite, &tests.into_iter().collect::<Vec<_>>())?;
        let passes = verdict == Verdict::Survived;
        println!("{} {}: {}", suite.package, suite.target, if passes { "passes" } else { "DOES NOT PASS" });
        sound &= passes;
    }
    Ok(sound)
}

fn read_all() -> Result<Vec<(String, Mutant)>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(SOURCES).map_err(|e| format!("{SOURCES}: {e}; run it from the repository's root"))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".toml") {
            let mutant = toml::from_str(&fs::read_to_string(&path)?).map_err(|e| format!("{name}: {e}"))?;
            all.push((name, mutant));
        }
    }
    all.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(all)
}

/// The file with the bug in it.
fn planted(mutant: &Mutant) -> Result<String> {
    let text = fs::read_to_string(&mutant.file).map_err(|e| format!("{}: {e}", mutant.file.display()))?;
    match text.matches(mutant.find.as_str()).count() {
        1 if mutant.find == mutant.replace => Err("it changes nothing".into()),
        1 => Ok(text.replacen(&mutant.find, &mutant.replace, 1)),
        n => {
            Err(format!("its text stands {n} times in {}, not once: move the bug along", mutant.file.display()).into())
        }
    }
}

/// So many of them, chosen by the seed alone; of one package, whose tests are built once.
fn pick_some<'a>(all: &'a [(String, Mutant)], count: usize, seed: &str) -> Vec<&'a (String, Mutant)> {
    let mut order: Vec<&(String, Mutant)> =
        all.iter().filter(|(_, mutant)| !LATE.contains(&mutant.package.as_str()) && !mutant.ignored).collect();
    order.sort_by_key(|(name, _)| fingerprint(format!("{seed} {name}").as_bytes()));
    let package = order.first().map(|(_, mutant)| mutant.package.as_str());
    order.sort_by_key(|(_, mutant)| Some(mutant.package.as_str()) != package);
    order.truncate(count);
    order
}

/// FNV-1a: the same in every version of everything.
fn fingerprint(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Where the bugs are planted.
struct Place {
    tree: PathBuf,
    target: PathBuf,
    /// That we are to stop.
    signals: RefCell<Signals>,
}

impl Place {
    fn prepare() -> Result<Place> {
        let signals = RefCell::new(Signals::new([SIGHUP, SIGINT, SIGTERM])?);
        let tree = copy_tree()?;
        let target = std::path::absolute(Path::new(PLACE).join("target"))?;
        if !target.exists() {
            let members = members(&tree)?;
            for folder in ["deps", "build", ".fingerprint"] {
                let (from, to) = (Path::new(BUILT).join(folder), target.join("debug").join(folder));
                take_dependencies(&from, &to, &members)?;
            }
        }
        Ok(Place { tree, target, signals })
    }

    /// Of the crates an answer depends on, but for the bugs themselves.
    fn version_of(&self, mutant: &Mutant) -> Result<String> {
        let mut folders: BTreeSet<PathBuf> = [PathBuf::from("Cargo.lock")].into();
        folders.insert(mutant.file.iter().take(2).collect());
        folders.insert(Path::new("crates").join(match mutant.package.strip_prefix("postrider") {
            Some("") => "outbox",
            Some(part) => part.trim_start_matches('-'),
            None => &mutant.package,
        }));
        let mut sum = 0;
        let mut left: Vec<PathBuf> = folders.iter().map(|folder| self.tree.join(folder)).collect();
        while let Some(path) = left.pop() {
            if path.is_dir() && !path.ends_with(SOURCES) {
                for entry in fs::read_dir(path)? {
                    left.push(entry?.path());
                }
            } else if path.is_file() {
                let name = path.to_string_lossy().into_owned();
                sum ^= fingerprint(&[name.as_bytes(), &fs::read(&path)?].concat());
            }
        }
        Ok(format!("{sum:016x}"))
    }

    fn ask(&self, mutant: &Mutant) -> Result<Verdict> {
        let file = self.tree.join(&mutant.file);
        let whole = fs::read(&mutant.file)?;
        fs::write(&file, planted(mutant)?)?;
        let tests: Vec<&str> = mutant.tests.iter().map(String::as_str).collect();
        let verdict = self.judge(mutant.suite(), &tests);
        fs::write(&file, whole)?;
        verdict
    }

    fn judge(&self, suite: Suite<'_>, tests: &[&str]) -> Result<Verdict> {
        let log = Path::new(PLACE).join("log");
        let output = fs::File::create(&log)?;
        let cargo = |words: &[&str], deadline| -> Result<End> {
            let mut command = Command::new("cargo");
            command.current_dir(&self.tree).env("CARGO_TARGET_DIR", &self.target);
            command.args(["test", "--locked", "--quiet", "--all-features", "-p", suite.package]);
            match suite.target {
                "lib" => command.arg("--lib"),
                "unit" => command.arg("--bins"),
                target => command.args(["--test", target]),
            };
            command.args(words).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output.try_clone()?);
            run_within(command, deadline, &mut self.signals.borrow_mut())
        };
        if cargo(&["--no-run"], Duration::MAX)? != End::Passed {
            return Ok(Verdict::DoesNotCompile);
        }
        let asked_for: &[&str] = if suite.ignored { &["--ignored"] } else { &[] };
        let words: Vec<&str> = ["--"].iter().chain(asked_for).chain(tests).copied().collect();
        Ok(match cargo(&words, DEADLINE)? {
            End::Failed => Verdict::Found,
            End::Hung => Verdict::Hung,
            End::Passed if fs::read_to_string(log)?.contains("running 0 tests") => Verdict::NoSuchTest,
            End::Passed => Verdict::Survived,
        })
    }
}

#[derive(PartialEq, Eq)]
enum End {
    Passed,
    Failed,
    Hung,
}

/// Runs a command in a process group of its own, so that whatever it started can be ended with it: at its deadline, and
/// when we are told to stop.
fn run_within(mut command: Command, deadline: Duration, signals: &mut Signals) -> Result<End> {
    let begun = Tick::now();
    let mut child = command.process_group(0).spawn()?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(if status.success() { End::Passed } else { End::Failed });
        }
        if signals.pending().next().is_some() {
            end(&mut child)?;
            return Err("stopped".into());
        }
        if Tick::now().since(begun) > deadline {
            end(&mut child)?;
            return Ok(End::Hung);
        }
        thread::sleep(Duration::from_millis(50));
    }
}

fn end(child: &mut Child) -> Result<()> {
    kill_process_group(Pid::from_child(child), Signal::KILL)?;
    child.wait()?;
    Ok(())
}

/// What Git knows of, and what it does not yet. Files that are the same stay as they are, so that little is built anew.
fn copy_tree() -> Result<PathBuf> {
    let tree = Path::new(PLACE).join("tree");
    let listed = Command::new("git").args(["ls-files", "-z", "-co", "--exclude-standard"]).output()?;
    if !listed.status.success() {
        return Err("git cannot list the files of this tree".into());
    }
    let mut wanted = BTreeSet::new();
    for name in String::from_utf8(listed.stdout)?.split('\0').filter(|name| !name.is_empty()) {
        let (from, to) = (Path::new(name), tree.join(name));
        let Ok(bytes) = fs::read(from) else { continue };
        wanted.insert(to.clone());
        if fs::read(&to).ok().as_deref() != Some(&bytes) {
            fs::create_dir_all(to.parent().unwrap_or(&tree))?;
            fs::copy(from, &to)?;
        }
    }
    remove_others(&tree, &wanted)?;
    Ok(tree)
}

fn remove_others(folder: &Path, wanted: &BTreeSet<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(&path, wanted)?;
        } else if !wanted.contains(&path) {
            fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// The names of the workspace's own packages and targets, as they begin the names of built files.
fn members(tree: &Path) -> Result<BTreeSet<String>> {
    let told = Command::new("cargo")
        .args(["metadata", "--locked", "--offline", "--no-deps", "--format-version=1"])
        .current_dir(tree)
        .output()?;
    let told: serde_json::Value = serde_json::from_slice(&told.stdout)?;
    let mut names = BTreeSet::new();
    for package in told["packages"].as_array().into_iter().flatten() {
        let targets = package["targets"].as_array().into_iter().flatten();
        names.extend(targets.chain([package]).filter_map(|named| named["name"].as_str()).map(str::to_owned));
    }
    if names.is_empty() { Err("cargo knows no packages of this tree".into()) } else { Ok(names) }
}

/// Takes over what is built of other people's packages; ours have to be built from the copy. What is large is linked:
/// whoever builds it anew makes a new file. The rest is copied, with its times, by which cargo knows what is fresh.
fn take_dependencies(from: &Path, to: &Path, members: &BTreeSet<String>) -> Result<()> {
    let Ok(entries) = fs::read_dir(from) else { return Ok(()) };
    fs::create_dir_all(to)?;
    for entry in entries {
        let (from, file) = (entry.as_ref().map(|e| e.path()).map_err(|e| e.to_string())?, entry?.file_name());
        let name = file.to_string_lossy();
        let package = name.rsplit_once('-').map_or(&*name, |(package, _)| package);
        let library = package.strip_prefix("lib").unwrap_or(package);
        let ours = |name: &str| members.iter().any(|member| member == name || member.replace('-', "_") == name);
        if ours(package) || ours(library) {
            continue;
        }
        let to = to.join(&file);
        if from.is_dir() {
            take_dependencies(&from, &to, &BTreeSet::new())?;
        } else if matches!(from.extension().and_then(|e| e.to_str()), Some("rlib" | "rmeta" | "so")) {
            fs::hard_link(&from, &to)?;
        } else {
            fs::copy(&from, &to)?;
            fs::File::options().write(true).open(&to)?.set_modified(fs::metadata(&from)?.modified()?)?;
        }
    }
    Ok(())
}

/// What was answered before.
struct Answers(BTreeMap<String, Verdict>);

impl Answers {
    fn file() -> PathBuf {
        Path::new(PLACE).join("answers")
    }

    fn read() -> Answers {
        let text = fs::read_to_string(Self::file()).unwrap_or_default();
        let line =
            |line: &str| line.split_once('\t').and_then(|(asked, word)| Some((asked.to_owned(), Verdict::of(word)?)));
        Answers(text.lines().filter_map(line).collect())
    }

    fn get(&self, asked: &str) -> Option<Verdict> {
        self.0.get(asked).copied()
    }

    /// Only what was found is remembered: whoever mends a test wants to see it again.
    fn put(&mut self, asked: &str, verdict: Verdict) -> Result<()> {
        if verdict.noticed() {
            self.0.insert(asked.to_owned(), verdict);
            let lines: String =
                self.0.iter().map(|(asked, verdict)| format!("{asked}\t{}\n", verdict.word())).collect();
            fs::write(Self::file(), lines)?;
        }
        Ok(())
    }
}
