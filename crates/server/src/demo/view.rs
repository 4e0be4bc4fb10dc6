//! What the demo shows: on a terminal a small table that is drawn again in place, elsewhere plain lines.

use std::io::IsTerminal;
use std::time::Duration;

use postrider::clock::Tick;

use super::Stage;
use crate::failure::Result;
use crate::output::{Output, print, print_bytes};
use crate::table::Table;

const REDRAW: Duration = Duration::from_millis(100);

pub struct View {
    silent: bool,
    live: bool,
    /// Lines of the table on the screen.
    drawn: usize,
    drawn_at: Tick,
}

impl View {
    pub fn new(output: Output) -> Self {
        View { silent: output.json, live: std::io::stdout().is_terminal(), drawn: 0, drawn_at: Tick::default() }
    }

    /// A sentence that stays.
    pub fn tell(&mut self, text: &str) -> Result<()> {
        if self.silent {
            return Ok(());
        }
        self.erase()?;
        print(text)
    }

    /// The table, if it is time to draw it again.
    pub async fn watch(&mut self, stage: &Stage) -> Result<()> {
        let now = Tick::now();
        if self.silent || !self.live || now.since(self.drawn_at) < REDRAW {
            return Ok(());
        }
        let text = counts(stage).await?;
        self.erase()?;
        print(&text)?;
        self.drawn = text.lines().count();
        self.drawn_at = now;
        Ok(())
    }

    fn erase(&mut self) -> Result<()> {
        if self.drawn > 0 {
            print_bytes(format!("\x1b[{}A\x1b[J", self.drawn).as_bytes())?;
            self.drawn = 0;
        }
        Ok(())
    }
}

/// Our books beside those of the receivers: what came to them over HTTP, by the answers they gave.
pub async fn counts(stage: &Stage) -> Result<String> {
    let stats = stage.outbox.stats().await?;
    let invoices: Vec<u16> = stage.receiver.arrivals().iter().map(|arrival| arrival.status).collect();
    let webhooks: Vec<u16> = stage.partner.calls().iter().map(|call| call.status).collect();
    let mut table = Table::new(["outbox", "pending", "leased", "sent", "dead", "receiver: 200", "500", "503", "422"]);
    let lanes = [
        (super::LANE, Some(invoices)),
        (postrider_webhooks::LANE, Some(webhooks)),
        (postrider_orders::LANE, None),
        (postrider_memories::LANE, None),
    ];
    for (lane, answers) in lanes {
        let s = stats.get(lane).copied().unwrap_or_default();
        let kept = |count: u64| {
            // Sagas and dead letters keep what has ended there, not the outbox.
            if lane == postrider_webhooks::LANE { "-".to_owned() } else { count.to_string() }
        };
        let [taken, broken, away, refused] = [200, 500, 503, 422].map(|status| match &answers {
            Some(answers) => answers.iter().filter(|answer| **answer == status).count().to_string(),
            None => "-".to_owned(),
        });
        let [pending, leased] = [s.pending, s.leased].map(|count| count.to_string());
        table.row([lane.to_owned(), pending, leased, kept(s.sent), kept(s.dead), taken, broken, away, refused]);
    }
    Ok(table.render())
}
