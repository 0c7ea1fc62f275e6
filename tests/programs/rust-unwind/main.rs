// Rust: unwinding through moved text, a caught panic, threads, and a backtrace that
// still knows its functions' names. (O49, O54)
//# build: pie,no-pie x bfd,lld
//# exit: 42
use std::backtrace::Backtrace;
use std::io::{Read, Write};

#[inline(never)]
fn nested_function_with_a_name(depth: u32) -> String {
    if depth > 0 {
        return nested_function_with_a_name(std::hint::black_box(depth - 1));
    }
    Backtrace::force_capture().to_string()
}

unsafe extern "C" {
    static fill_pages: [u32; 5];
    static fill_text: [u8; 4096];
    static mut fill_data: [u32; 1024];
}

fn check_fill() {
    // SAFETY: the symbols of common/fill.S, with as many pages as fill_pages says.
    unsafe {
        for page in 0..fill_pages[0] as usize {
            let function: extern "C" fn() -> usize =
                std::mem::transmute(fill_text.as_ptr().add(page * 4096));
            assert_eq!(function() & 0xffff_ffff, page);
        }
        let data = &raw mut fill_data as *mut u32;
        for page in 0..fill_pages[3] as usize {
            let word = data.add(page * 1024);
            assert_eq!(*word, (page as u32).wrapping_mul(0x9e3779b1).wrapping_add(4));
            word.add(1).write_volatile(page as u32);
        }
    }
}

fn main() {
    check_fill();
    std::panic::set_hook(Box::new(|_| ()));
    let caught = std::panic::catch_unwind(|| {
        let text = String::from("dropped while unwinding");
        if text.len() > 3 {
            panic!("caught");
        }
    });
    assert_eq!(*caught.unwrap_err().downcast_ref::<&str>().unwrap(), "caught");
    let sum: u64 = (0..4)
        .map(|i| std::thread::spawn(move || (0..1000).map(|x| x * i).sum::<u64>()))
        .map(|thread| thread.join().unwrap())
        .sum();
    assert_eq!(sum, 2997000);
    let named = nested_function_with_a_name(3).matches("nested_function_with_a_name").count();
    println!("names in the backtrace: {named}");
    println!("ready");
    std::io::stdout().flush().unwrap();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    std::process::exit(if named >= 4 { 42 } else { 1 });
}
