//! `postrider scm`: the history of repositories, read into our tables and turned into memories.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use postrider_memories::scm::{
    Halt, Halted, Kind, Materialised, Point, RepoStatus, Scm, Source, Strictness, Synced, Trouble,
};
use postrider_memories::scm::{git::Git, gitlab::Gitlab, svn::Svn};
use serde_json::json;

use crate::cli::{self, ScmSource, SyncOptions};
use crate::config::Config;
use crate::database;
use crate::failure::{Ending, Failure, Result};
use crate::output::{Output, count};
use crate::parts;
use crate::secret;
use crate::table::Table;

pub async fn run(config: &Config, args: cli::Scm, output: Output) -> Result<Ending> {
    let outbox = database::open_ready(config).await?;
    let scm = Scm::new(outbox.clone());
    let ending = match args {
        cli::Scm::Sync(args) => sync(&scm, args, output).await,
        cli::Scm::Materialize { limit, repo, token } => {
            materialise(&scm, limit as usize, repo, token.as_deref(), output).await
        }
        cli::Scm::Consume { from, repo } => {
            let memories = parts::memories(config, &outbox)?;
            let from = from.map(|text| if text == "start" { Point::Start } else { Point::Rev(text) });
            let made = scm.consume(&memories, repo, from.as_ref()).await?;
            output.show(&made, || {
                format!(
                    "{}: {} stored, {} merged with others, {} deferred, {} known before, {} rejected",
                    count(made.cards, "card"),
                    made.stored,
                    made.merged,
                    made.deferred,
                    made.known,
                    made.rejected
                )
            })?;
            Ok(Ending::Done)
        }
        cli::Scm::Status => {
            let repos = scm.status().await?;
            output.show(&json!({ "items": repos }), || status_table(&repos))?;
            Ok(Ending::Done)
        }
    };
    outbox.flush().await;
    ending
}

fn stopped(halt: Halt) -> Failure {
    match halt {
        Halt::Store(error) => error.into(),
        Halt::Source(Trouble::Network(why)) => {
            Failure::unreachable(format!("{why}; the next run goes on from where this one began"))
        }
        Halt::Source(Trouble::Authentication(why)) => Failure::failed(format!("not let in: {why}")),
        Halt::Source(Trouble::Source(why)) => Failure::usage(why),
    }
}

fn token_of(reference: Option<&str>) -> Result<Option<String>> {
    let Some(reference) = reference else { return Ok(None) };
    if !secret::is_reference(reference) {
        return Err(Failure::usage("--token says where the token is kept: env:NAME, file:PATH or exec:COMMAND"));
    }
    secret::resolve(reference).map(Some).map_err(Failure::usage)
}

fn source(wanted: &ScmSource) -> Result<(Box<dyn Source>, &SyncOptions)> {
    let opened = |source: Result<Box<dyn Source>, Trouble>| source.map_err(|trouble| stopped(trouble.into()));
    Ok(match wanted {
        ScmSource::Git { path, options } => {
            (opened(Git::new(path, options.name.clone()).map(|s| Box::new(s) as Box<dyn Source>))?, options)
        }
        ScmSource::Svn { url, options } => {
            (opened(Svn::new(url, options.name.clone()).map(|s| Box::new(s) as Box<dyn Source>))?, options)
        }
        ScmSource::Gitlab { url, token, options } => {
            let token = token_of(token.as_deref())?;
            let gitlab = Gitlab::new(url, token.as_deref(), options.name.clone());
            (opened(gitlab.map(|s| Box::new(s) as Box<dyn Source>))?, options)
        }
    })
}

/// A bar on a terminal, nothing elsewhere.
fn bar(output: Output, what: &'static str) -> ProgressBar {
    let target = if output.json { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(None, target);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {pos}/{len} {wide_bar} {eta}") {
        bar.set_style(style);
    }
    bar.set_message(what);
    bar
}

async fn sync(scm: &Scm, args: ScmSource, output: Output) -> Result<Ending> {
    let (source, options) = source(&args)?;
    if let Some(space) = &options.space {
        postrider_memories::note::check_space(space).map_err(Failure::usage)?;
    }
    let strictness =
        if options.mode == cli::SyncMode::BestEffort { Strictness::BestEffort } else { Strictness::Strict };
    let bar_of_sync = bar(output, "records");
    let progress = |done: u64, total: Option<u64>| {
        bar_of_sync.set_length(total.unwrap_or(done));
        bar_of_sync.set_position(done);
    };
    let synced = scm.sync(&*source, strictness, options.space.as_deref(), &progress).await;
    bar_of_sync.finish_and_clear();
    let synced = synced.map_err(stopped)?;
    let mut patches = Materialised::default();
    if options.diffs {
        let bar = bar(output, "diffs");
        let done = scm.materialise(&*source, usize::MAX, &|done, _| bar.set_position(done)).await;
        bar.finish_and_clear();
        // The history is there all the same; what is open is for `scm materialize`.
        patches = done.unwrap_or_else(|Halted { done, halt }| {
            tracing::warn!(why = halt.to_string(), "not all changes could be fetched");
            Materialised { failed: done.failed + 1, ..done }
        });
    }
    let mut shown = json!(synced);
    shown["diffs"] = json!(patches);
    output.show(&shown, || told(&synced, patches))?;
    Ok(Ending::failed_if(synced.skipped > 0 || patches.failed > 0))
}

fn told(synced: &Synced, patches: Materialised) -> String {
    let skipped = if synced.skipped > 0 { format!(", {} left out", synced.skipped) } else { String::new() };
    let diffs = patches.materialised + patches.failed;
    let diffs =
        if diffs > 0 { format!("; {} of {diffs} diffs materialised", patches.materialised) } else { String::new() };
    format!("repository {}: {} read, {} new{skipped}{diffs}", synced.repo_id, count(synced.seen, "record"), synced.new)
}

async fn materialise(
    scm: &Scm,
    limit: usize,
    only: Option<i64>,
    token: Option<&str>,
    output: Output,
) -> Result<Ending> {
    let token = token_of(token)?;
    let wanted = |status: &RepoStatus| status.open_patches > 0 && only.is_none_or(|id| id == status.repo.repo_id);
    let repos: Vec<RepoStatus> = scm.status().await?.into_iter().filter(wanted).collect();
    let hosts = repos.iter().filter(|status| status.repo.kind == Kind::Gitlab);
    if token.is_some() && only.is_none() && hosts.count() > 1 {
        return Err(Failure::usage("there are several GitLab projects; say which one the token is for: --repo ID"));
    }
    let (mut all, mut wrong) = (Materialised::default(), false);
    for status in repos {
        let bar = bar(output, "diffs");
        let left = limit.saturating_sub((all.materialised + all.failed) as usize);
        let progress = |done, _| bar.set_position(done);
        let done = match again(&status, token.as_deref()) {
            Ok(source) => scm.materialise(&*source, left, &progress).await,
            Err(trouble) => Err(Halted { done: Materialised::default(), halt: trouble.into() }),
        };
        bar.finish_and_clear();
        let (done, halt) = match done {
            Ok(done) => (done, None),
            Err(Halted { done, halt }) => (done, Some(halt)),
        };
        all.materialised += done.materialised;
        all.failed += done.failed;
        match halt {
            None => {}
            // One that cannot be reached keeps none of the others.
            Some(halt) => {
                wrong = true;
                tracing::error!(repo_id = status.repo.repo_id, why = halt.to_string(), "changes could not be fetched");
            }
        }
    }
    output.show(&all, || format!("{} materialised, {} failed", count(all.materialised, "diff"), all.failed))?;
    Ok(Ending::failed_if(wrong || all.failed > 0))
}

/// The source of a repository that is known.
fn again(status: &RepoStatus, token: Option<&str>) -> Result<Box<dyn Source>, Trouble> {
    let (repo, name) = (&status.repo, Some(status.repo.name.clone()));
    Ok(match repo.kind {
        Kind::Git => Box::new(Git::new(std::path::Path::new(&repo.url), name)?),
        Kind::Svn => Box::new(Svn::new(&repo.url, name)?),
        Kind::Gitlab => Box::new(Gitlab::new(&repo.url, token, name)?),
    })
}

fn status_table(repos: &[RepoStatus]) -> String {
    let mut table = Table::new(["id", "kind", "name", "space", "records", "unconsumed", "open diffs"]);
    for status in repos {
        table.row([
            status.repo.repo_id.to_string(),
            status.repo.kind.as_str().to_owned(),
            status.repo.name.clone(),
            status.repo.target_space.clone().unwrap_or_default(),
            status.records.to_string(),
            status.unconsumed.to_string(),
            status.open_patches.to_string(),
        ]);
    }
    table.render()
}
