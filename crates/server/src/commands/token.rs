//! `postrider token`: access to the API.

use postrider::Timestamp;
use serde::Serialize;
use serde_json::json;

use crate::cli;
use crate::config::Config;
use crate::database;
use crate::failure::{Ending, Failure, Result};
use crate::output::Output;
use crate::sessions::{Session, Sessions};
use crate::table::Table;
use crate::tokens::{Scope, Token, Tokens, Wish};

/// Lanes, and spaces, that one token names.
const MOST_NAMED: usize = 100;
const MOST_NAME_BYTES: usize = 255;

pub async fn run(config: &Config, args: cli::Token, output: Output) -> Result<Ending> {
    match args {
        cli::Token::Create(args) => create(config, args, output).await,
        cli::Token::List => list(config, output).await,
        cli::Token::Revoke { id } => revoke(config, id, output).await,
    }
}

async fn create(config: &Config, args: cli::CreateToken, output: Output) -> Result<Ending> {
    for lane in &args.lanes {
        config.lane(lane)?;
    }
    for (flag, named) in [("--lane", &args.lanes), ("--space", &args.spaces)] {
        if named.len() > MOST_NAMED {
            let what =
                format!("{flag} was given {} times; a token is for at most {MOST_NAMED}, or for all", named.len());
            return Err(Failure::usage(what));
        }
    }
    if args.name.len() > MOST_NAME_BYTES {
        return Err(Failure::usage(format!("--name takes at most {MOST_NAME_BYTES} bytes")));
    }
    if args.expires.is_some_and(|after| after.is_zero()) {
        return Err(Failure::usage(
            "--expires 0 would make a token that is worthless at once; write 90d, or leave it out",
        ));
    }
    let mut scopes = args.scopes;
    scopes.sort_unstable();
    scopes.dedup();
    let tokens = Tokens::new(database::open_ready(config).await?);
    let wish = Wish { name: args.name, scopes, lanes: args.lanes, spaces: args.spaces, expires: args.expires };
    let (token, text) = tokens.create(wish).await?;
    output.show(&json!({ "id": token.id, "token": text, "scopes": token.scopes, "lane": token.lane, "lanes": token.lanes, "spaces": token.spaces, "expires_at": token.expires_at }), || {
        format!("{text}\n\nKeep it: it is not shown again. Send it as `Authorization: Bearer {text}`.")
    })?;
    Ok(Ending::Done)
}

/// A token and the browsers that are signed in with it.
#[derive(Serialize)]
struct Listed<'a> {
    #[serde(flatten)]
    token: &'a Token,
    sessions: Vec<&'a Session>,
}

async fn list(config: &Config, output: Output) -> Result<Ending> {
    let outbox = database::open_existing(config).await?;
    let tokens = Tokens::new(outbox.clone()).list().await?;
    let sessions = Sessions::list(&outbox).await?;
    let of = |token: &Token| sessions.iter().filter(|session| session.token_id == token.id).collect::<Vec<_>>();
    let items: Vec<_> = tokens.iter().map(|token| Listed { token, sessions: of(token) }).collect();
    output.show(&json!({ "items": items, "next_cursor": null }), || {
        if tokens.is_empty() {
            return "no tokens; make one with `postrider token create --scope enqueue`".to_owned();
        }
        let columns = ["id", "name", "scopes", "lanes", "spaces", "created", "expires", "revoked", "sessions"];
        let mut table = Table::new(columns);
        let moment = |at: Option<Timestamp>| at.map_or("-".to_owned(), |at| at.to_string());
        for Listed { token, sessions } in &items {
            let Token { id, name, scopes, lanes, spaces, created_at, expires_at, revoked_at, .. } = token;
            let sessions = sessions.len().to_string();
            let scopes = scopes.iter().map(Scope::to_string).collect::<Vec<_>>().join(",");
            let all_or = |named: &[String]| if named.is_empty() { "all".to_owned() } else { named.join(",") };
            let (expires, revoked) = (moment(*expires_at), moment(*revoked_at));
            table.row([
                id.to_string(),
                name.clone(),
                scopes,
                all_or(lanes),
                all_or(spaces),
                created_at.to_string(),
                expires,
                revoked,
                sessions,
            ]);
        }
        table.render()
    })?;
    Ok(Ending::Done)
}

async fn revoke(config: &Config, id: i64, output: Output) -> Result<Ending> {
    let revoked = Tokens::new(database::open_existing(config).await?).revoke(id).await?;
    output.show(&json!({ "id": id, "revoked": revoked }), || {
        let told = if revoked { "is revoked" } else { "does not exist, or was revoked before" };
        format!("token {id} {told}")
    })?;
    Ok(Ending::failed_if(!revoked))
}
