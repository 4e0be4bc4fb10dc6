//! `postrider top`: the dashboard's overview in a terminal. It asks the database itself, so it needs no server.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Cell, Paragraph, Row, Sparkline, Table, TableState};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::config::Config;
use crate::database;
use crate::failure::{Ending, Failure, Result};
use crate::live::{LaneSample, Live, Sample, Watching};
use crate::output::Output;
use crate::table::Table as Plain;

/// How long a key is waited for before the screen is drawn again.
const KEYS: Duration = Duration::from_millis(200);
/// How many samples the share of success is taken over, here as on the dashboard.
const RECENT: usize = 30;
/// A count that is older is told as such; of a deep backlog it is made more rarely.
const OLD: Duration = Duration::from_secs(5);

pub async fn run(config: &Config, output: Output) -> Result<Ending> {
    let outbox = database::open_ready(config).await?;
    let live = Live::new(outbox, None);
    let (stop, stopped) = watch::channel(false);
    let _watching = Watching::new(live.clone());
    let mut newest = live.subscribe();
    let sampling = live.start(stopped);
    let unanswered = || Failure::failed("no sample of how things go");
    newest.changed().await.map_err(|_| unanswered())?;
    if output.json || !std::io::stdout().is_terminal() {
        let sample = newest.borrow().clone();
        if sample.stale {
            return Err(unanswered());
        }
        output.show(&serde_json::json!(*sample), || plain(&sample))?;
        return Ok(Ending::Done);
    }
    let title = format!("postrider top, {}", database::shown(config));
    let told_to_leave = told_to_leave()?;
    let screen = tokio::task::spawn_blocking(move || {
        let mut terminal = ratatui::try_init()?;
        let mut first = 0;
        let watched = loop {
            let past = live.past();
            let samples: Vec<&Sample> = past.iter().map(|sample| &**sample).collect();
            let mut room = 0;
            if let Err(error) = terminal.draw(|frame| room = draw(frame, &title, &samples, first)) {
                break Err(error);
            }
            match event::poll(KEYS).and_then(|ready| if ready { event::read().map(Some) } else { Ok(None) }) {
                _ if told_to_leave.load(Ordering::Relaxed) => break Ok(()),
                Ok(Some(Event::Key(key)))
                    if matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
                        || (key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL)) =>
                {
                    break Ok(());
                }
                Ok(Some(Event::Key(key))) => {
                    let lanes = samples.last().map_or(0, |now| now.lanes.len());
                    first = scrolled(first, key.code, lanes, room);
                }
                Ok(_) => {}
                Err(error) => break Err(error),
            }
        };
        ratatui::restore();
        watched
    });
    let watched = screen.await.map_err(|e| Failure::failed(format!("the screen: {e}")))?;
    let _ = stop.send(true);
    let _ = sampling.await;
    watched.map_err(|e| Failure::failed(format!("the terminal: {e}")))?;
    Ok(Ending::Done)
}

/// Set by a signal to end, so that the terminal is left as it was found.
fn told_to_leave() -> Result<Arc<AtomicBool>> {
    let told = Arc::new(AtomicBool::new(false));
    for kind in [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()] {
        let listening = signal(kind).map_err(|e| Failure::failed(format!("cannot listen for signals: {e}")));
        let (mut signals, told) = (listening?, told.clone());
        tokio::spawn(async move {
            signals.recv().await;
            told.store(true, Ordering::Relaxed);
        });
    }
    Ok(told)
}

/// The first lane to be shown after a key, of so many, with room for so many.
fn scrolled(first: usize, key: KeyCode, lanes: usize, room: usize) -> usize {
    let last = lanes.saturating_sub(room);
    match key {
        KeyCode::Down | KeyCode::Char('j') => first + 1,
        KeyCode::Up | KeyCode::Char('k') => first.saturating_sub(1),
        KeyCode::PageDown | KeyCode::Char(' ') => first + room.max(1),
        KeyCode::PageUp => first.saturating_sub(room.max(1)),
        KeyCode::Home => 0,
        KeyCode::End => last,
        _ => first,
    }
    .min(last)
}

const TITLES: [&str; 8] = ["lane", "state", "pending", "leased", "oldest due", "sent/s", "retried/s", "dead/s"];

fn cells(name: &str, lane: &LaneSample) -> [String; 8] {
    [
        name.to_owned(),
        if lane.paused { "paused" } else { "open" }.to_owned(),
        lane.pending.to_string(),
        lane.leased.to_string(),
        format!("{:.1} s", lane.oldest_due_seconds),
        format!("{:.1}", lane.sent_per_second),
        format!("{:.1}", lane.retries_per_second),
        format!("{:.1}", lane.dead_per_second),
    ]
}

/// The same for a pipe.
fn plain(sample: &Sample) -> String {
    let mut table = Plain::new(TITLES);
    for (name, lane) in &sample.lanes {
        table.row(cells(name, lane));
    }
    format!("{}\nworkers: {}\n", table.render().trim_end(), sample.workers)
}

/// Of all lanes together.
fn total(sample: &Sample, of: impl Fn(&LaneSample) -> f64) -> f64 {
    sample.lanes.values().map(of).sum()
}

/// Draws all of it, lanes from the `first` on; answers how many have room.
fn draw(frame: &mut Frame<'_>, title: &str, samples: &[&Sample], first: usize) -> usize {
    let Some(now) = samples.last() else { return 0 };
    let lanes = now.lanes.len() as u16 + 3;
    let areas = [
        Constraint::Length(1),
        // A line of air, two of numbers, and a note.
        Constraint::Length(4),
        Constraint::Length(8),
        Constraint::Min(lanes),
        Constraint::Length(1),
    ];
    let [head, numbers, charts, table, foot] = Layout::vertical(areas).areas(frame.area());
    frame.render_widget(Line::from(title.to_owned()).bold(), head);
    frame.render_widget(summary(now, samples), numbers);
    let [sent, failed, pending, oldest] = Layout::horizontal([Constraint::Ratio(1, 4); 4]).areas(charts);
    chart(frame, sent, "sent/s", Color::Green, samples, |now| total(now, |lane| lane.sent_per_second));
    chart(frame, failed, "retried, dead/s", Color::Red, samples, |now| {
        total(now, |lane| lane.retries_per_second + lane.dead_per_second)
    });
    chart(frame, pending, "pending", Color::Blue, samples, |now| total(now, |lane| lane.pending as f64));
    chart(frame, oldest, "oldest due, s", Color::Magenta, samples, oldest_due);
    // Without its borders and its head.
    let room = usize::from(table.height.saturating_sub(3));
    // The terminal may have grown since somebody scrolled.
    let first = first.min(now.lanes.len().saturating_sub(room));
    let rows = now.lanes.iter().map(|(name, lane)| {
        let style = match lane {
            lane if lane.paused => Style::new().yellow(),
            lane if lane.dead_per_second > 0.0 => Style::new().red(),
            _ => Style::new(),
        };
        Row::new(cells(name, lane).map(Cell::from)).style(style)
    });
    let widths = [Constraint::Fill(2)].into_iter().chain([Constraint::Fill(1); 7]);
    let lanes = Table::new(rows, widths)
        .header(Row::new(TITLES).style(Modifier::BOLD))
        .block(Block::bordered().title(which(first, now.lanes.len(), room)));
    frame.render_stateful_widget(lanes, table, &mut TableState::new().with_offset(first));
    let keys = if now.lanes.len() > room { "q: leave   up, down, page up, page down: other lanes" } else { "q: leave" };
    frame.render_widget(Line::from(keys).dim(), foot);
    room
}

/// Says so when not all lanes fit.
fn which(first: usize, lanes: usize, room: usize) -> String {
    if lanes <= room {
        return " lanes ".to_owned();
    }
    format!(" lanes {} to {} of {lanes} ", first + 1, (first + room).min(lanes))
}

fn oldest_due(sample: &Sample) -> f64 {
    sample.lanes.values().map(|lane| lane.oldest_due_seconds).fold(0.0, f64::max)
}

/// Of the attempts that ended within the last samples, how many in a hundred were taken.
fn success(samples: &[&Sample]) -> Option<f64> {
    let recent = || samples.iter().rev().filter(|sample| !sample.stale).take(RECENT);
    let sent: f64 = recent().map(|sample| total(sample, |lane| lane.sent_per_second)).sum();
    let failed: f64 = recent().map(|sample| total(sample, |lane| lane.retries_per_second + lane.dead_per_second)).sum();
    (sent + failed > 0.0).then(|| 100.0 * sent / (sent + failed))
}

fn summary<'a>(now: &'a Sample, samples: &[&Sample]) -> Paragraph<'a> {
    let number =
        |name: &'static str, value: String| [Span::from(name).dim(), Span::from(value).bold(), Span::from("   ")];
    let counted = Duration::from_millis((now.at_ms - now.counted_at_ms).max(0) as u64);
    let counted = if counted > OLD { format!(" (counted {} s ago)", counted.as_secs()) } else { String::new() };
    let much = [
        number("sent/s ", format!("{:.0}", total(now, |lane| lane.sent_per_second))),
        number("pending ", format!("{:.0}{counted}", total(now, |lane| lane.pending as f64))),
        number("leased ", format!("{:.0}", total(now, |lane| lane.leased as f64))),
        number("oldest due ", format!("{:.1} s", oldest_due(now))),
    ];
    let well = [
        number("success ", success(samples).map_or("-".to_owned(), |share| format!("{share:.1} %"))),
        number("dead/s ", format!("{:.1}", total(now, |lane| lane.dead_per_second))),
        number("workers ", now.workers.to_string()),
    ];
    let mut lines = vec![Line::from(""), Line::from(much.concat()), Line::from(well.concat())];
    if now.stale {
        lines.push(Line::from("the database does not answer; this is from before").red());
    } else if now.workers == 0 {
        lines.push(Line::from("no worker has called lately; start one: postrider worker").yellow());
    }
    Paragraph::new(lines)
}

fn chart(
    frame: &mut Frame<'_>,
    area: Rect,
    name: &str,
    color: Color,
    samples: &[&Sample],
    of: impl Fn(&Sample) -> f64,
) {
    let block = Block::bordered().title(format!(" {name} "));
    let width = usize::from(area.width.saturating_sub(2));
    let newest = samples.iter().rev().take(width).rev();
    // Small numbers keep their shape.
    let data: Vec<u64> = newest.map(|sample| (of(sample) * 100.0) as u64).collect();
    frame.render_widget(Sparkline::default().block(block).data(&data).style(color), area);
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn screen(samples: &[&Sample]) -> String {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal
            .draw(|frame| {
                draw(frame, "postrider top, sqlite://x.db", samples, 0);
            })
            .unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn the_screen_tells_what_the_sample_says() {
        let lane = LaneSample {
            pending: 1234,
            leased: 5,
            sent_per_second: 17.25,
            retries_per_second: 4.5,
            dead_per_second: 1.25,
            paused: true,
            ..LaneSample::default()
        };
        let sample = Sample { lanes: [("invoices".to_owned(), lane)].into(), workers: 2, ..Sample::default() };
        let shown = screen(&[&sample, &sample]);
        for word in [
            "sqlite://x.db",
            "invoices",
            "paused",
            "pending 1234",
            "17.2",
            "success 75.0 %",
            "dead/s 1.2",
            "workers 2",
            "q: leave",
        ] {
            assert!(shown.contains(word), "{word} is missing in\n{shown}");
        }
        assert!(!shown.contains("no worker"));
        assert!(screen(&[&Sample::default()]).contains("success -"), "nothing ended: no share");
        let late = screen(&[&Sample { at_ms: 60_000, counted_at_ms: 48_500, ..sample.clone() }]);
        assert!(late.contains("pending 1234 (counted 11 s ago)") && late.contains("workers 2"), "{late}");
        let alone = screen(&[&Sample { workers: 0, ..sample.clone() }]);
        assert!(alone.contains("no worker has called lately"), "{alone}");
        let stale = screen(&[&Sample { stale: true, ..sample }]);
        assert!(stale.contains("the database does not answer"), "{stale}");
    }

    #[test]
    fn a_tiny_terminal_is_no_reason_to_fall_over() {
        let mut terminal = Terminal::new(TestBackend::new(12, 3)).unwrap();
        let sample = Sample::default();
        terminal
            .draw(|frame| {
                draw(frame, "t", &[&sample], 0);
            })
            .unwrap();
        terminal
            .draw(|frame| {
                draw(frame, "t", &[], 0);
            })
            .unwrap();
    }

    #[test]
    fn more_lanes_than_lines_can_all_be_come_to() {
        let lanes = (0..30).map(|n| (format!("lane-{n:02}"), LaneSample::default())).collect();
        let sample = Sample { lanes, ..Sample::default() };
        let mut terminal = Terminal::new(TestBackend::new(100, 24)).unwrap();
        let mut room = 0;
        terminal.draw(|frame| room = draw(frame, "t", &[&sample], 0)).unwrap();
        assert!(terminal.backend().to_string().contains(&format!("lanes 1 to {room} of 30")));
        let end = scrolled(0, KeyCode::End, 30, room);
        terminal.draw(|frame| room = draw(frame, "t", &[&sample], end)).unwrap();
        let shown = terminal.backend().to_string();
        assert!(shown.contains("lane-29") && !shown.contains("lane-00") && shown.contains("to 30 of 30"), "{shown}");
        assert_eq!(scrolled(end, KeyCode::Down, 30, room), end, "there is an end");
        assert_eq!(scrolled(end, KeyCode::Up, 30, room), end - 1);
        let mut large = Terminal::new(TestBackend::new(100, 60)).unwrap();
        large.draw(|frame| room = draw(frame, "t", &[&sample], end)).unwrap();
        assert!(large.backend().to_string().contains("lane-00"), "what fits is shown");
        assert_eq!(scrolled(3, KeyCode::PageUp, 30, room), 0);
        assert_eq!(scrolled(7, KeyCode::Down, 5, room), 0, "all fit: nothing is hidden");
    }
}
