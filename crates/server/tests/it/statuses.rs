//! What a lane makes of its destination's answers.

use std::time::Duration;

use crate::home::{Home, wait_until};
use crate::receiver::Receiver;

/// The receiver answers each message with the status it asks for.
fn outcomes(statuses: &str) -> Vec<(u16, String, i64)> {
    let home = Home::sqlite();
    let receiver = Receiver::start(|request| request.body.parse().ok());
    let lane = format!(
        "[lane.a]\ncourier = \"http\"\nurl = \"{}\"\nmax_attempts = 2\nbackoff_sec = [0.01]\npoll_interval_sec = 0.05\n{statuses}\n",
        receiver.url
    );
    home.write("postrider.toml", &lane);
    home.run(&["config", "check"]).done();
    let asked: Vec<(u16, i64)> = [200, 204, 302, 404, 408, 409, 410, 429, 500, 503]
        .map(|status| (status, home.enqueue(&["a", "--payload", &status.to_string()])))
        .into();
    let running = home.start_silent(&["worker", "--lane", "a"]);
    wait_until("all have ended", || home.number("SELECT COUNT(*) FROM outbox") == 0);
    running.signal(rustix::process::Signal::TERM);
    running.ends_within(Duration::from_secs(20));
    let requests = receiver.requests();
    let tries = |status: u16| requests.iter().filter(|request| request.body == status.to_string()).count() as i64;
    asked
        .iter()
        .map(|(status, id)| (*status, home.show(*id)["status"].as_str().unwrap().to_owned(), tries(*status)))
        .collect()
}

fn read(outcomes: &[(u16, String, i64)]) -> Vec<(u16, &str, i64)> {
    outcomes.iter().map(|(status, outcome, tries)| (*status, outcome.as_str(), *tries)).collect()
}

#[test]
fn by_custom_and_as_the_lane_says() {
    let custom = [
        (200, "sent", 1),
        (204, "sent", 1),
        (302, "dead", 1),
        (404, "dead", 1),
        (408, "dead", 2),
        (409, "dead", 1),
        (410, "dead", 1),
        (429, "dead", 2),
        (500, "dead", 2),
        (503, "dead", 2),
    ];
    assert_eq!(read(&outcomes("")), custom, "docs/configuration.md says so");
    let own = r#"statuses = { "404" = "retry", "409" = "sent", "5xx" = "dead", "503" = "retry", "204" = "dead" }"#;
    let mut wanted = custom;
    (wanted[1].1, wanted[3].2, wanted[5].1, wanted[8].2) = ("dead", 2, "sent", 1);
    assert_eq!(read(&outcomes(own)), wanted);
}

#[test]
fn nonsense_is_refused() {
    let home = Home::sqlite();
    for (statuses, says) in [
        (r#"{ "404" = "again" }"#, "none of sent, retry, dead"),
        (r#"{ "700" = "dead" }"#, "no status"),
        (r#"{ "4xy" = "dead" }"#, "no status"),
        (r#"{ "2xx" = "retry" }"#, "nothing would ever count as sent"),
        (r#"[404]"#, "statuses"),
    ] {
        home.write(
            "postrider.toml",
            &format!("[lane.a]\ncourier = \"http\"\nurl = \"http://x\"\nstatuses = {statuses}\n"),
        );
        home.run(&["config", "check"]).refused(2, &["postrider.toml:4: ", says]);
    }
}
