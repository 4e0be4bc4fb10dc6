//! What the demo shows: on a terminal a small table that is drawn again in place, elsewhere plain lines.

use std::io::IsTerminal;
use std::time::Duration;

use postrider::Outbox;
use postrider::clock::Tick;

use super::receiver::Receiver;
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
    pub async fn watch(&mut self, outbox: &Outbox, receiver: &Receiver) -> Result<()> {
        let now = Tick::now();
        if self.silent || !self.live || now.since(self.drawn_at) < REDRAW {
            return Ok(());
        }
        let text = counts(outbox, receiver).await?;
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

/// Our books beside the receiver's.
pub async fn counts(outbox: &Outbox, receiver: &Receiver) -> Result<String> {
    let stats = outbox.stats().await?;
    let arrivals = receiver.arrivals();
    let of = |status: u16| arrivals.iter().filter(|a| a.status == status).count().to_string();
    let mut table = Table::new(["outbox", "pending", "leased", "sent", "dead", "receiver: 200", "500", "503", "422"]);
    for lane in [super::LANE, postrider_orders::LANE, postrider_memories::LANE] {
        let s = stats.get(lane).copied().unwrap_or_default();
        let [pending, leased, sent, dead] = [s.pending, s.leased, s.sent, s.dead].map(|n| n.to_string());
        let answers = if lane == super::LANE { [200, 500, 503, 422].map(of) } else { [(); 4].map(|()| "-".to_owned()) };
        let [taken, broken, away, refused] = answers;
        table.row([lane.to_owned(), pending, leased, sent, dead, taken, broken, away, refused]);
    }
    Ok(table.render())
}
