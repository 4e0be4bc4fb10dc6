//! `postrider outbox requeue`: dead messages come back, by id or all of a lane, in batches. However it ends (done,
//! interrupted, or without a database) it says how many came back, and running it again goes on with the rest.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use postrider::store::Requeued;
use postrider::{Died, Outbox, Timestamp};
use serde::Serialize;
use serde_json::json;
use tokio::sync::watch;

use crate::cli;
use crate::failure::{Ending, Result, complain};
use crate::output::{Output, count, print};
use crate::signals::interruption;

/// Messages of one step: after it there is progress to tell, and an interruption is heard.
const STEP: u32 = 500;
/// Results and ids that are told one by one; of those that simply came back fewer.
const MOST_TOLD: usize = 10_000;
const MOST_BACK: usize = 1_000;

/// What became of the messages so far.
#[derive(Debug, Default, Serialize)]
struct Sum {
    requeued: u64,
    conflicts: u64,
    not_dead: u64,
    held: u64,
    interrupted: bool,
    /// One by one, those that did not come back before the others; at most so many.
    results: Vec<One>,
    #[serde(skip_serializing_if = "is_zero")]
    results_left_out: u64,
    #[serde(skip)]
    back: Vec<One>,
}

#[derive(Debug, Serialize)]
struct One {
    id: i64,
    outcome: Requeued,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Sum {
    fn add(&mut self, id: i64, outcome: Requeued) {
        let (number, list, most) = match outcome {
            Requeued::Requeued => (&mut self.requeued, &mut self.back, MOST_BACK),
            Requeued::Conflict => (&mut self.conflicts, &mut self.results, MOST_TOLD),
            Requeued::NotDead => (&mut self.not_dead, &mut self.results, MOST_TOLD),
            Requeued::Held => (&mut self.held, &mut self.results, MOST_TOLD),
        };
        *number += 1;
        if list.len() < most {
            list.push(One { id, outcome });
        } else {
            self.results_left_out += 1;
        }
    }

    fn in_order(&mut self, ids: &[i64]) {
        self.results.append(&mut self.back);
        let place = |id: i64| ids.iter().position(|asked| *asked == id);
        if ids.len() <= STEP as usize {
            self.results.sort_by_key(|one| place(one.id));
        }
    }

    fn for_people(&self, of_lane: bool) -> String {
        let mut text = format!("requeued {}\n", count(self.requeued, "message"));
        let numbers = [
            (self.conflicts, "stay dead: their key or active key belongs to another undelivered message"),
            (self.not_dead, "were not dead any more"),
            (self.held, "are held by somebody else at the moment; try them again"),
        ];
        // One that was named is named again; of a whole lane those in trouble are, as far as that can be read.
        for One { id, outcome } in self.results.iter().take(100) {
            text.push_str(&match outcome {
                Requeued::Requeued => continue,
                Requeued::NotDead if of_lane => continue,
                Requeued::NotDead => format!("message {id} is not dead; nothing changed\n"),
                Requeued::Conflict => {
                    format!("message {id} stays dead: another undelivered message has its key or its active key\n")
                }
                Requeued::Held => format!("message {id} is held by somebody else at the moment; try it again\n"),
            });
        }
        let in_trouble = self.conflicts + self.held + self.not_dead;
        for (number, what) in numbers.iter().filter(|(number, _)| *number > 0 && (of_lane || in_trouble > 100)) {
            text.push_str(&format!("{number} {what}\n"));
        }
        if self.interrupted {
            text.push_str("interrupted: run it again to go on with the rest\n");
        }
        text
    }
}

/// What is to come back.
enum Wanted {
    Ids(Vec<i64>),
    /// All of a lane that had died by then.
    Lane(String, Timestamp),
}

/// The next step's messages, from where the last one ended.
struct Steps {
    wanted: Wanted,
    at: usize,
    after: Option<Died>,
}

impl Steps {
    async fn new(outbox: &Outbox, args: cli::Requeue) -> Result<Self> {
        let wanted = match args.lane {
            // What dies again after its return has had its chance.
            Some(lane) => Wanted::Lane(lane, outbox.now().await?),
            None => Wanted::Ids(args.ids),
        };
        Ok(Steps { wanted, at: 0, after: None })
    }

    fn ids(&self) -> &[i64] {
        if let Wanted::Ids(ids) = &self.wanted { ids } else { &[] }
    }

    /// Empty at the end.
    async fn next(&mut self, outbox: &Outbox) -> Result<Vec<i64>> {
        match &self.wanted {
            Wanted::Ids(ids) => {
                let step: Vec<i64> = ids[self.at..].iter().copied().take(STEP as usize).collect();
                self.at += step.len();
                Ok(step)
            }
            Wanted::Lane(lane, until) => {
                let died = outbox.dead(lane, self.after, *until, STEP).await?;
                self.after = died.last().copied().or(self.after);
                Ok(died.into_iter().map(|died| died.id).collect())
            }
        }
    }
}

pub async fn run(outbox: &Outbox, args: cli::Requeue, output: Output) -> Result<Ending> {
    let interrupted = interruption()?;
    let (of_lane, dry_run) = (args.lane.is_some(), args.dry_run);
    let mut steps = Steps::new(outbox, args).await?;
    if dry_run {
        return would(outbox, steps, &interrupted, output).await;
    }
    let progress = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()).with_style(
        ProgressStyle::with_template("{spinner} {msg}  {elapsed}").unwrap_or_else(|_| ProgressStyle::default_spinner()),
    );
    let mut sum = Sum::default();
    let ended = all(outbox, &mut steps, &interrupted, &progress, &mut sum).await;
    progress.finish_and_clear();
    outbox.flush().await;
    sum.in_order(steps.ids());
    match ended {
        Ok(()) => {
            output.show(&sum, || sum.for_people(of_lane))?;
            let left = sum.conflicts + sum.held + if of_lane { 0 } else { sum.not_dead };
            Ok(Ending::failed_if(left > 0 || sum.interrupted))
        }
        Err(failure) if sum.requeued == 0 => Err(failure),
        Err(failure) => {
            output.show(&sum, || sum.for_people(of_lane))?;
            let back = count(sum.requeued, "message");
            Err(failure.with(format!("; {back} came back before it: run it again to go on with the rest")))
        }
    }
}

async fn all(
    outbox: &Outbox,
    steps: &mut Steps,
    interrupted: &watch::Receiver<bool>,
    progress: &ProgressBar,
    sum: &mut Sum,
) -> Result<()> {
    loop {
        if *interrupted.borrow() {
            sum.interrupted = true;
            return Ok(());
        }
        let ids = steps.next(outbox).await?;
        if ids.is_empty() {
            return Ok(());
        }
        let outcomes = outbox.requeue(ids.clone()).await?;
        ids.into_iter().zip(outcomes).for_each(|(id, outcome)| sum.add(id, outcome));
        progress.set_message(format!("requeued {}", count(sum.requeued, "message")));
        progress.tick();
    }
}

/// Counts what would come back, step by step.
async fn would(
    outbox: &Outbox,
    mut steps: Steps,
    interrupted: &watch::Receiver<bool>,
    output: Output,
) -> Result<Ending> {
    let (mut number, mut ids) = (0u64, Vec::new());
    let of_lane = matches!(steps.wanted, Wanted::Lane(..));
    while !*interrupted.borrow() {
        let step = steps.next(outbox).await?;
        if step.is_empty() {
            if of_lane {
                // They came in the order of their deaths.
                ids.sort_unstable();
            }
            return told(number, &ids, output).map(|()| Ending::Done);
        }
        let dead = if of_lane { step } else { outbox.dead_among(step).await? };
        number += dead.len() as u64;
        ids.extend(dead.into_iter().take(MOST_TOLD - ids.len()));
    }
    complain(&format!("interrupted; {} counted so far", count(number, "message")));
    Ok(Ending::SomethingFailed)
}

fn told(number: u64, ids: &[i64], output: Output) -> Result<()> {
    if output.json {
        return output.json(&json!({ "dry_run": true, "count": number, "ids": ids }));
    }
    print(&super::outbox::would_text("requeue", number, ids))
}
