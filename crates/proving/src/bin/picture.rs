//! `picture URL FILE [--dark] [--phone] [--until EXPRESSION]`: a page as Chromium shows it, once the expression is true.

use proving::browser::Browser;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, file, ..] = arguments.as_slice() else {
        panic!("picture URL FILE [--dark] [--phone] [--until EXPRESSION]")
    };
    let has = |name: &str| arguments.iter().any(|one| one == name);
    let until = arguments.iter().position(|one| one == "--until").and_then(|at| arguments.get(at + 1));
    let mut browser = Browser::start();
    let (width, height) = if has("--phone") { (390, 844) } else { (1280, 900) };
    browser.screen(width, height, has("--dark"));
    browser.goto(url);
    browser.wait(until.map_or("!document.body.innerText.includes('Loading')", String::as_str));
    std::fs::write(file, browser.picture()).expect("the file can be written");
}
