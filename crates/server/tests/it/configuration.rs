//! Where settings come from, seen from outside. What the file may say is tested beside its reader.

use crate::home::Home;

#[test]
fn the_database_comes_from_flag_environment_file_dsn_default() {
    let home = Home::sqlite();
    let which = |flag: bool, environment: bool, file: bool, dsn: bool| {
        for name in ["flag", "environment", "file", "dsn", "postrider"] {
            let _ = std::fs::remove_file(home.path(&format!("{name}.db")));
        }
        home.write("postrider.toml", if file { "database = \"sqlite://file.db\"" } else { "" });
        let mut command =
            home.command(if flag { &["migrate", "--database", "sqlite://flag.db"] } else { &["migrate"] });
        command.env("POSTRIDER_DATABASE", if environment { "sqlite://environment.db" } else { "" });
        command.env("POSTGRES_DSN", if dsn { "sqlite://dsn.db" } else { "" });
        assert!(command.status().unwrap().success());
        ["flag", "environment", "file", "dsn", "postrider"]
            .into_iter()
            .find(|name| home.path(&format!("{name}.db")).exists())
            .unwrap()
    };
    assert_eq!(which(true, true, true, true), "flag");
    assert_eq!(which(false, true, true, true), "environment");
    assert_eq!(which(false, false, true, true), "file");
    assert_eq!(which(false, false, false, true), "dsn");
    assert_eq!(which(false, false, false, false), "postrider");
}

#[test]
fn a_wrong_file_stops_every_command_with_its_line() {
    let home = Home::sqlite();
    home.write("postrider.toml", "[lane.a]\ncourier = \"noop\"\nconcurrency = 0\n");
    home.run(&["migrate"]).refused(2, &["error: postrider.toml:3: concurrency: must be a whole number"]);
    home.write("mine.toml", "\n[[store]]\n");
    home.run(&["worker", "--config", "mine.toml"]).refused(2, &["[store]", "does not have yet"]);
    home.run(&["worker", "--config", "none.toml"]).refused(2, &["cannot read the configuration none.toml"]);
    assert!(!home.path("postrider.db").exists());
}

#[test]
fn a_wrong_environment_is_named() {
    let home = Home::sqlite();
    let output = home.command(&["worker", "--once"]).env("OUTBOX_BACKOFF_SEC", "5,,10").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("OUTBOX_BACKOFF_SEC"));
}

#[test]
fn secrets_are_references() {
    let home = Home::sqlite();
    home.write("postrider.toml", "database = \"env:MY_DATABASE\"");
    home.run(&["migrate"]).refused(2, &["MY_DATABASE"]);
    assert!(home.command(&["migrate"]).env("MY_DATABASE", "sqlite://mine.db").status().unwrap().success());
    assert!(home.path("mine.db").exists());
}

/// Both are said by `config check`, and by what runs for long at its start; neither keeps anybody from starting.
#[test]
fn who_could_listen_or_read_the_password_is_told() {
    use std::os::unix::fs::PermissionsExt;
    let home = Home::sqlite();
    let open = "database = \"postgres://u:canary-password@127.0.0.2:1/a\"\n";
    home.write("postrider.toml", open);
    let mode =
        |mode| std::fs::set_permissions(home.path("postrider.toml"), std::fs::Permissions::from_mode(mode)).unwrap();
    mode(0o644);
    let told = |args: &[&str]| {
        let mut command = home.command(args);
        command.env_remove("POSTRIDER_DATABASE");
        let output = command.output().unwrap();
        let told = [output.stdout, output.stderr].concat();
        let told = String::from_utf8(told).unwrap();
        assert!(!told.contains("canary-password"), "{told}");
        told
    };
    assert!(told(&["config", "check"]).contains("can be read by others"));
    mode(0o600);
    let closed = told(&["config", "check"]);
    assert!(!closed.contains("can be read by others") && !closed.contains("is reached"), "{closed}");
    // What has no password, or follows the advice, is not warned of.
    mode(0o644);
    for fine in
        ["", "database = \"env:DB_OF_THIS_TEST\"\n", "database = \"file:db.url\"\n", "database = \"sqlite://a.db\"\n"]
    {
        home.write("db.url", "postgres://u:canary-password@127.0.0.1:1/a").write("postrider.toml", fine);
        let mut command = home.command(&["config", "check"]);
        command.env_remove("POSTRIDER_DATABASE").env("DB_OF_THIS_TEST", "sqlite://a.db");
        let output = command.output().unwrap();
        let told = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert!(!told.contains("can be read by others"), "{fine}: {told}");
    }
    // Nobody answers there; it is said before anybody is asked.
    home.write("postrider.toml", "database = \"mysql://u:canary-password@192.0.2.1:1/a\"\n");
    let check = told(&["config", "check"]);
    assert!(check.contains("is reached in the clear"), "{check}");
}

/// The database, its log and the key for secrets are their owner's alone, whatever the user's mask allows.
#[test]
fn what_is_made_is_its_owners_alone() {
    use std::os::unix::fs::PermissionsExt;
    let home = Home::sqlite();
    let server = crate::api::Server::start(&home, &[]);
    let subscription = r#"{"url": "https://hooks.example.com/in", "event_types": ["*"]}"#; // its secret wants the key
    server.post("/v1/subscriptions", &[("content-type", "application/json")], subscription).answered(201);
    for name in ["postrider.db", "postrider.db-wal", "postrider.db-shm", "postrider.key"] {
        let mode = std::fs::metadata(home.path(name)).unwrap_or_else(|e| panic!("{name}: {e}")).permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    server.stop();
}
