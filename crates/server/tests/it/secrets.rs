//! Secrets that change while a process runs, and the signals that are no end.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::Signal;

use crate::api::Server;
use crate::home::{Home, wait_until};
use crate::receiver::Receiver;

/// Takes only whoever has the secret of the day.
fn guarded() -> (Receiver, Arc<Mutex<String>>) {
    let secret = Arc::new(Mutex::new("first".to_owned()));
    let wanted = secret.clone();
    let door = move |given: &str| if given == *wanted.lock().unwrap() { 200 } else { 401 };
    (Receiver::start(move |request| Some(door(request.header("authorization")))), secret)
}

#[test]
fn a_secret_is_read_again_at_a_hangup_and_when_it_is_refused() {
    let (receiver, secret) = guarded();
    let home = Home::sqlite();
    let lane = "courier = \"http\"\nheaders = { Authorization = \"file:token\" }\n";
    home.write("postrider.toml", &format!("[lane.work]\n{lane}url = \"{}\"\n", receiver.url)).write("token", "first");
    let server = Server::start(&home, &[]);
    let sent = |server: &Server, number: usize| {
        server.post("/v1/outbox/work", &[], "x").answered(201);
        wait_until("it is sent", || home.stats("work")["sent"] == number);
        assert_eq!(home.stats("work")["dead"], 0);
    };
    sent(&server, 1);
    // Both are changed, and nobody says so: the first refusal does.
    home.write("token", "second");
    *secret.lock().unwrap() = "second".to_owned();
    sent(&server, 2);
    let tried = receiver.requests().len();
    assert_eq!(tried, 3, "refused once, and then let in");
    // Told in time, it is not even refused.
    home.write("token", "third");
    server.signal(Signal::HUP);
    *secret.lock().unwrap() = "third".to_owned();
    wait_until("the hangup is heard", || {
        server.post("/v1/outbox/work", &[], "x").answered(201);
        std::thread::sleep(Duration::from_millis(50));
        receiver.requests().last().is_some_and(|request| request.header("authorization") == "third")
    });
    let (code, log) = server.stop();
    assert_eq!(code, 0, "a hangup is no end");
    assert!(log.contains("secrets are read again") && !log.contains("second"), "{log}");
}

#[test]
fn a_quit_is_a_stop_with_manners() {
    let receiver = Receiver::start(|_| {
        std::thread::sleep(Duration::from_secs(2));
        Some(200)
    });
    let home = Home::sqlite();
    home.write(
        "postrider.toml",
        &format!("[lane.work]\ncourier = \"http\"\nurl = \"{}\"\ntimeout_ms = 20000\n", receiver.url),
    );
    let id = home.enqueue(&["work", "--payload", "x"]);
    for (signal, ends) in [(Signal::HUP, false), (Signal::QUIT, true)] {
        let worker = home.start(&["worker", "--lane", "work"]);
        let before = receiver.requests().len();
        wait_until("it is under way", || receiver.requests().len() > before || home.show(id)["status"] == "sent");
        worker.signal(signal);
        if !ends {
            wait_until("it goes on", || home.show(id)["status"] == "sent");
            worker.signal(Signal::QUIT);
        }
        worker.ends_within(crate::home::PATIENCE).done();
        assert_eq!(home.show(id)["status"], "sent", "nothing stays leased");
    }
}
